"""Types of the compiled core; the docstrings are in the module."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, overload

class Pending:
    def wait(self) -> None: ...
    def synchronize(self) -> None: ...
    def is_done(self) -> bool: ...
    def source(self) -> int: ...

class Communicator:
    timeout: timedelta
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def transport(self) -> str: ...
    @property
    def sequence(self) -> int: ...
    def all_reduce(
        self,
        tensor: Any,
        op: str = "sum",
        *,
        factor: float = 1.0,
        algorithm: str = "auto",
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def compressed_all_reduce(
        self,
        tensors: Sequence[Any],
        codec: Codec,
        *,
        factor: float = 1.0,
        divisor: float = 1.0,
        residual: Any = None,
        infinite: bool = False,
        stochastic: bool = False,
        seed: int = 0,
        counts: CodecCounts | None = None,
        algorithm: str = "auto",
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def reduce(
        self,
        tensor: Any,
        root: int,
        op: str = "sum",
        *,
        factor: float = 1.0,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def broadcast(
        self,
        tensor: Any,
        root: int,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def all_gather(
        self,
        outputs: Sequence[Any],
        input: Any,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def all_gather_single(
        self,
        output: Any,
        input: Any,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def gather(
        self,
        outputs: Sequence[Any] | None,
        input: Any,
        root: int,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def gather_single(
        self,
        output: Any,
        input: Any,
        root: int,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def scatter(
        self,
        output: Any,
        inputs: Sequence[Any] | None,
        root: int,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def scatter_single(
        self,
        output: Any,
        input: Any,
        root: int,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def reduce_scatter(
        self,
        output: Any,
        inputs: Sequence[Any],
        op: str = "sum",
        *,
        factor: float = 1.0,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def reduce_scatter_single(
        self,
        output: Any,
        input: Any,
        op: str = "sum",
        *,
        factor: float = 1.0,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def all_to_all(
        self,
        outputs: Sequence[Any],
        inputs: Sequence[Any],
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def all_to_all_single(
        self,
        output: Any,
        input: Any,
        output_counts: Sequence[int] | None = None,
        input_counts: Sequence[int] | None = None,
        *,
        timeout: timedelta | None = None,
        async_op: bool = False,
    ) -> Pending | None: ...
    def barrier(
        self, *, timeout: timedelta | None = None, async_op: bool = False
    ) -> Pending | None: ...
    def monitored_barrier(
        self, wait_all_ranks: bool = False, *, timeout: timedelta | None = None
    ) -> None: ...
    @overload
    def send(
        self,
        tensor: Any,
        peer: int,
        tag: int = 0,
        *,
        timeout: timedelta | None = None,
        async_op: Literal[False] = False,
    ) -> None: ...
    @overload
    def send(
        self,
        tensor: Any,
        peer: int,
        tag: int = 0,
        *,
        timeout: timedelta | None = None,
        async_op: Literal[True],
    ) -> Pending: ...
    @overload
    def recv(
        self,
        tensor: Any,
        peer: int | None = None,
        tag: int = 0,
        *,
        timeout: timedelta | None = None,
        async_op: Literal[False] = False,
    ) -> int: ...
    @overload
    def recv(
        self,
        tensor: Any,
        peer: int | None = None,
        tag: int = 0,
        *,
        timeout: timedelta | None = None,
        async_op: Literal[True],
    ) -> Pending: ...
    def flag_latency_ns(self) -> float: ...
    def all_reduce_algorithm(self, bytes: int) -> str: ...
    def abort(self, reason: str) -> None: ...
    def shutdown(self) -> None: ...
    @property
    def name(self) -> str: ...
    @property
    def global_ranks(self) -> list[int]: ...
    def _set_group(self, name: str, global_ranks: Sequence[int]) -> None: ...
    def stats(self) -> dict[str, Any]: ...
    def records(self, rank: int) -> list[dict[str, Any]]: ...
    def rank_state(self, rank: int) -> dict[str, Any]: ...
    def failure_report(self) -> str | None: ...
    def failure_cause(self) -> dict[str, Any] | None: ...
    def living_ranks(self) -> list[int]: ...
    def _address(self) -> Any: ...

class ShmOffer:
    def __init__(
        self,
        world_size: int,
        *,
        slot_bytes: int,
        slots: int,
        streaming: str,
        spin_polls: int,
        heap_bytes: int,
        channel_bytes: int,
        single_copy: str,
        records: int,
        liveness: str,
        all_reduce: Sequence[tuple[int, str]] = (),
        check_headers: bool = True,
    ) -> None: ...
    @property
    def address(self) -> str: ...
    def serve(self, timeout: timedelta, look: Callable[[list[int]], str] | None = None) -> None: ...
    def accept(self, timeout: timedelta) -> Communicator: ...

def join_shm(address: str, rank: int, timeout: timedelta, world_size: int = 0) -> Communicator: ...
def try_join_shm(
    address: str, rank: int, world_size: int, limit: timedelta, timeout: timedelta
) -> Communicator | None: ...
def check_reachable(address: str, rank: int) -> None: ...
def communicator_from_address(address: Any) -> Communicator: ...
def living_communicators() -> list[Communicator]: ...
def shrink(
    communicator: Communicator, ranks: Sequence[int], timeout: timedelta
) -> Communicator: ...
def skip_files_under(folder: str) -> None: ...
def set_call_sites(setting: str) -> None: ...
def call_site() -> str: ...
def set_failure_hook(hook: Callable[[str], None]) -> None: ...
def set_test_fault(
    what: str, rank: int, operation: int, chunk: int = -1, value: int = 0
) -> None: ...
def instruction_set() -> str: ...
def set_instruction_set(name: str) -> bool: ...
def reduce(
    output: Any, sources: Sequence[Any], op: str, scales: Sequence[float] | None = None
) -> None: ...

class Codec:
    def __init__(self, format: str, block: int = 0) -> None: ...
    @property
    def format(self) -> str: ...
    @property
    def block(self) -> int: ...
    @property
    def value_bytes(self) -> int: ...
    def scales(self, count: int) -> int: ...
    def wire_bytes(self, count: int) -> int: ...

class CodecCounts:
    @property
    def values(self) -> int: ...
    @property
    def overflows(self) -> int: ...
    @property
    def underflows(self) -> int: ...
    @property
    def non_finite(self) -> int: ...
    @property
    def squares(self) -> float: ...
    @property
    def error_squares(self) -> float: ...

def transcode(
    codec: Codec,
    count: int,
    *,
    wires: Sequence[tuple[Any, Any]] = (),
    inputs: Sequence[Any] | None = None,
    own: int = 0,
    first: int = 0,
    factor: float = 1.0,
    divisor: float = 1.0,
    residual: Any = None,
    encoded: tuple[Any, Any] | None = None,
    outputs: Sequence[Any] | None = None,
    stream: bool = False,
    infinite: bool = False,
    stochastic: bool = False,
    seed: int = 0,
) -> CodecCounts: ...
def codec_counts(tensor: Any) -> CodecCounts: ...

# Where `cuda` is not None.
def cuda_transcode(
    codec: Codec,
    count: int,
    *,
    stream: int,
    wires: Sequence[tuple[Any, Any]] = (),
    inputs: Sequence[Any] | None = None,
    own: int = 0,
    first: int = 0,
    factor: float = 1.0,
    divisor: float = 1.0,
    residual: Any = None,
    encoded: tuple[Any, Any] | None = None,
    outputs: Sequence[Any] | None = None,
    infinite: bool = False,
    stochastic: bool = False,
    seed: int = 0,
    counts: Any = None,
) -> None: ...
def cuda_reduce(
    output: Any,
    sources: Sequence[Any],
    op: str,
    *,
    stream: int,
    scales: Sequence[float] | None = None,
) -> None: ...

class PeerMemory:
    """Of a build with CUDA."""

    def __init__(
        self,
        device: int,
        rank: int,
        world_size: int,
        timeout: timedelta,
        *,
        blocks: int = 32,
        slots: int = 4,
        slot_bytes: int = 65536,
    ) -> None: ...
    @property
    def rank(self) -> int: ...
    @property
    def world_size(self) -> int: ...
    @property
    def device(self) -> int: ...
    @property
    def blocks(self) -> int: ...
    @property
    def handle(self) -> str: ...
    def connect(self, handles: Sequence[str]) -> None: ...
    def all_reduce(
        self,
        input: Any,
        output: Any,
        op: str = "sum",
        *,
        stream: int,
        algorithm: str = "auto",
        scales: Sequence[float] | None = None,
    ) -> None: ...
    def compressed_all_reduce(
        self,
        tensors: Sequence[Any],
        codec: Codec,
        *,
        stream: int,
        algorithm: str = "auto",
        factor: float = 1.0,
        divisor: float = 1.0,
        residual: Any | None = None,
        counts: Any | None = None,
        infinite: bool = False,
        stochastic: bool = False,
        seed: int = 0,
    ) -> None: ...
    def check(self) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...

def peer_handle(
    host: str,
    process: int,
    device: str,
    *,
    blocks: int = 32,
    slots: int = 4,
    slot_bytes: int = 65536,
) -> str: ...
def why_not_mapped(mine: str, theirs: str) -> str: ...
def support_table() -> dict[str, list[str]]: ...

eager_bytes: int
max_ranks: int
cuda: str | None

class NcclApi:
    def __init__(
        self,
        nccl: str = "",
        cudart: str = "",
        nccl_candidates: Sequence[str] = (),
        cudart_candidates: Sequence[str] = (),
        cuda: bool = True,
    ) -> None: ...
    @property
    def version(self) -> int: ...
    @property
    def version_text(self) -> str: ...
    @property
    def path(self) -> str: ...
    def capabilities(self) -> dict[str, bool]: ...
    def check(self, result: int, what: str) -> None: ...
    def unique_id(self) -> bytes: ...
    def try_init(self) -> None: ...
    def devices(self) -> int: ...

class NcclSettings:
    def __init__(
        self,
        *,
        blocking: bool = False,
        cga_cluster_size: int | None = None,
        min_ctas: int | None = None,
        max_ctas: int | None = None,
        net_name: str | None = None,
        traffic_class: int | None = None,
        comm_name: str | None = None,
        cta_policy: int | None = None,
        nvls_ctas: int | None = None,
        collnet_enable: int | None = None,
        split_share: bool = False,
        shrink_share: bool = False,
        device: int = -1,
        codec_on_host: bool = False,
        wire_chunk_bytes: int = 4 << 20,
        high_priority: bool = True,
        check: str = "late",
        records: int = 512,
        heartbeat: timedelta = ...,
        abort_limit: timedelta = ...,
    ) -> None: ...

class NcclRegistration:
    def close(self) -> None: ...

class NcclCommunicator(Communicator):
    def __init__(
        self,
        api: NcclApi,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        settings: NcclSettings = ...,
    ) -> None: ...
    def connect(self, device: int = -1) -> None: ...
    def split(self, color: int, key: int = 0, device: int = -1) -> NcclCommunicator | None: ...
    def shrink(self, excluded: Sequence[int], device: int = -1) -> NcclCommunicator: ...
    def grow(self, world_size: int, device: int = -1) -> NcclCommunicator: ...
    @staticmethod
    def join(
        api: NcclApi,
        store: Any,
        rank: int,
        world_size: int,
        timeout: timedelta,
        settings: NcclSettings = ...,
        device: int = -1,
        growth: int = 1,
    ) -> NcclCommunicator: ...
    def begin_group(self) -> None: ...
    def end_group(self, async_op: bool = False) -> Pending | None: ...
    def register_buffer(self, data: int, bytes: int, device: int = -1) -> NcclRegistration: ...
    def register_window(
        self, data: int, bytes: int, device: int = -1, symmetric: bool = True
    ) -> NcclRegistration: ...
    def _comm_state(self, device: int) -> str: ...
    def _abandon(self) -> None: ...

nccl_pool_functions: tuple[str, str]

def serve_nccl_pools(api: NcclApi) -> None: ...
def nccl_segments() -> list[tuple[int, int, int]]: ...
def nccl_pool_failure() -> str: ...
def set_stream_source(source: Callable[[int], int]) -> None: ...
