"""Predictions for clusters that are not at hand: the time of a collective, and of a training step.

``predict(group, bytes)`` for a collective, ``predict_step(job, cluster)`` for a step, ``drain(buckets, backward)`` for
buckets that travel during backward, ``fit_link(samples, world_size)`` for a link that was measured; all by an
alpha-beta model (algorithms.py has the formulas and whose they are). ``python -m pycomm.plan`` is the command. What it
does not know: congestion inside a network, slow ranks, chunks too small for the bandwidth, caches.
"""

from pycomm.plan.algorithms import ALGORITHMS, Cost
from pycomm.plan.cluster import LINKS, Cluster, Group, Link
from pycomm.plan.fit import Sample, fit_link
from pycomm.plan.operation import Prediction, predict, predictions
from pycomm.plan.scale import Point, curve
from pycomm.plan.step import (
    Bucket,
    Job,
    Step,
    Timeline,
    bubble,
    buckets_of,
    drain,
    predict_step,
)

__all__ = [
    "ALGORITHMS",
    "LINKS",
    "Bucket",
    "Cluster",
    "Cost",
    "Group",
    "Job",
    "Link",
    "Point",
    "Prediction",
    "Sample",
    "Step",
    "Timeline",
    "bubble",
    "buckets_of",
    "curve",
    "drain",
    "fit_link",
    "predict",
    "predict_step",
    "predictions",
]
