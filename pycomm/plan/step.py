"""A training step: buckets that leave while backward goes on, tensor and pipeline parallelism, and what remains.

Sources: 6 * parameters * tokens floating-point operations (Kaplan et al. 2020), a third of them forward; four
all-reduces per layer and microbatch of tensor parallelism, two of them in forward (Shoeybi et al. 2019, Megatron-LM);
the pipeline's bubble (Huang et al. 2019, GPipe; the same for 1F1B, Narayanan et al. 2021).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pycomm.errors import InvalidArgument
from pycomm.plan.algorithms import phase
from pycomm.plan.cluster import Cluster
from pycomm.plan.operation import Prediction, predict

# ---- one link, many buckets -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """Gradients that travel together."""

    ready: float  # seconds after backward's begin
    seconds: float  # of their all-reduce


@dataclass(frozen=True)
class Timeline:
    """When each bucket travelled, in seconds after backward's begin."""

    spans: tuple[tuple[float, float], ...]
    backward: float  # its end: later than without communication, if that takes the same thread

    @property
    def end(self) -> float:
        """Of both."""
        return max(self.backward, self.spans[-1][1] if self.spans else 0.0)

    @property
    def exposed(self) -> float:
        """What the last bucket takes longer than backward."""
        return self.end - self.backward


def drain(buckets: Sequence[Bucket], backward: float, overlap: bool = True) -> Timeline:
    """Backward produces buckets, the link takes them in that order, one after the other.

    Without overlap nothing travels before backward has ended.
    """
    spans: list[tuple[float, float]] = []
    free = 0.0 if overlap else backward
    for bucket in buckets:
        begin = max(free, bucket.ready)
        free = begin + bucket.seconds
        spans.append((begin, free))
    return Timeline(tuple(spans), backward)


def buckets_of(
    sizes: Sequence[float], bucket_bytes: float, first_bytes: float | None = None
) -> list[list[int]]:
    """Which parameters share a bucket, given their gradients' bytes in the order in which backward produces them.

    As torch's DDP: a bucket is closed as soon as it holds `bucket_bytes`, the first one at `first_bytes` (DDP: 1 MiB).
    """
    if not bucket_bytes > 0 or (first_bytes is not None and not first_bytes > 0):
        raise InvalidArgument(f"a bucket's bytes must be positive: {bucket_bytes}, {first_bytes}")
    found: list[list[int]] = []
    open_, held = [], 0.0
    limit = bucket_bytes if first_bytes is None else first_bytes
    for i, size in enumerate(sizes):
        open_.append(i)
        held += size
        if held >= limit:
            found.append(open_)
            open_, held, limit = [], 0.0, bucket_bytes
    return [*found, open_] if open_ else found


def bubble(stages: int, microbatches: int) -> float:
    """The part of a step in which a pipeline's stage waits: (stages - 1) / (microbatches + stages - 1)."""
    if min(stages, microbatches) < 1:
        raise InvalidArgument(
            f"stages ({stages}) and microbatches ({microbatches}) must be positive"
        )
    return (stages - 1) / (microbatches + stages - 1)


# ---- a whole job ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A transformer's training. Ranks are numbered tensor first, then data, then pipeline parallel."""

    parameters: float
    layers: int
    hidden: int
    sequence: int  # tokens
    sequences: int = 1  # of a microbatch
    microbatches: int = 1  # of a step, one after the other on every replica
    tensor: int = 1
    pipeline: int = 1
    flops: float = 4e14  # per second, that a rank reaches in matrix products
    compression: str = "none"
    bucket_bytes: float = 25 * 2**20
    overlap: bool = True
    activation_bytes: int = 2  # of a value

    def __post_init__(self) -> None:
        counts = {
            name: getattr(self, name)
            for name in (
                "parameters",
                "layers",
                "hidden",
                "sequence",
                "sequences",
                "microbatches",
                "tensor",
                "pipeline",
                "flops",
                "bucket_bytes",
                "activation_bytes",
            )
        }
        for name, value in counts.items():
            if not 0 < value < math.inf:
                raise InvalidArgument(f"{name} must be positive: {value}")
        if self.layers % self.pipeline:
            raise InvalidArgument(
                f"{self.layers} layers do not divide into {self.pipeline} pipeline stages"
            )

    @property
    def tokens(self) -> int:
        """Of a microbatch."""
        return self.sequence * self.sequences


@dataclass(frozen=True)
class Step:
    """Seconds of one step, by what they are spent on, and what that makes of the machines."""

    data: int  # replicas
    compute: float
    tensor: float  # all-reduces of activations
    pipeline: float  # messages between stages
    bubble: float
    exposed: float  # averaging of gradients, after backward
    hidden: float  # the same, during backward
    gradients: Prediction  # of one bucket
    tokens: float  # of all replicas

    @property
    def seconds(self) -> float:
        """Of the step, without the optimizer."""
        return self.compute + self.tensor + self.pipeline + self.bubble + self.exposed

    @property
    def efficiency(self) -> float:
        """Computation's part of it."""
        return self.compute / self.seconds


def predict_step(job: Job, cluster: Cluster) -> Step:
    """One step of a job on all ranks of a cluster.

    Every stage is as heavy as the others. Messages of tensor and pipeline parallelism hide behind nothing; gradients
    behind the last microbatch's backward, bucket by bucket, evenly. Raises InvalidArgument for degrees that do not
    divide the cluster.
    """
    ranks, of_a_replica = cluster.world_size, job.tensor * job.pipeline
    if ranks % of_a_replica:
        raise InvalidArgument(
            f"{ranks} ranks do not divide by tensor ({job.tensor}) times pipeline ({job.pipeline}) parallelism"
        )
    data = ranks // of_a_replica
    forward = 2 * job.parameters * job.tokens / (job.flops * of_a_replica)
    activations = job.tokens * job.hidden * job.activation_bytes
    one = predict(cluster.group(job.tensor, 1), activations, memory=cluster.memory).seconds
    of_layers = job.layers // job.pipeline * 2 * one  # of a microbatch, each way
    hand_over = 0.0
    if job.pipeline > 1:
        apart = ranks // job.pipeline >= cluster.ranks_per_host
        link = cluster.between if apart else cluster.inside
        flows = cluster.ranks_per_host if apart else 1
        hand_over = phase(link, 1, activations / job.tensor, flows=flows).seconds
    compute, tensor = job.microbatches * 3 * forward, job.microbatches * 2 * of_layers
    pipeline = job.microbatches * 2 * hand_over
    busy = compute + tensor + pipeline
    idle = bubble(job.pipeline, job.microbatches)
    timeline, gradients = _average(job, cluster, data, 2 * forward + of_layers)
    communicated = sum(end - begin for begin, end in timeline.spans)
    return Step(
        data,
        compute,
        tensor,
        pipeline,
        busy * idle / (1 - idle),
        timeline.exposed,
        communicated - timeline.exposed,
        gradients,
        float(data * job.microbatches * job.tokens),
    )


def _average(job: Job, cluster: Cluster, data: int, backward: float) -> tuple[Timeline, Prediction]:
    """Of a stage's gradients, in float32, over the replicas; during one backward."""
    total = 4 * job.parameters / (job.tensor * job.pipeline)
    group = cluster.group(data, job.tensor)
    count = max(1, math.ceil(total / job.bucket_bytes))
    one = predict(group, total / count, compression=job.compression, memory=cluster.memory)
    buckets = [Bucket(backward * (i + 1) / count, one.seconds) for i in range(count)]
    return drain(buckets, backward, job.overlap), one
