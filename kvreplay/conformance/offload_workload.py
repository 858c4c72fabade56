"""The workload and the recorded steps of an offloading vector, as records.

Engine, requests and events are those of scheduler vectors, with what offloading adds. Of the steps only what the
scheduler did is read here: it drives the connector, and what the connector did is compared.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct, field

from kvreplay.conformance.vector import Json, UnsupportedVectorError
from kvreplay.conformance.workload import Count, EngineSpec, GroupSpec, Positive, RequestSpec, StepEvent
from kvreplay.connectors.offloading.layout import OffloadGroup, OffloadLayout
from kvreplay.errors import ConfigError
from kvreplay.kv.specs import CHUNKED_LOCAL, FULL, MAMBA, SLIDING_WINDOW

Delay = Count | Annotated[list[Count], Meta(min_length=1)]
"""In steps; of a list the n-th for the n-th job of its kind, the last value for all that follow."""


class TierSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated second tier; `fail_loads` and `fail_stores` count its jobs of that kind from 0."""

    store_delay: Count = 0
    load_delay: Count = 0
    retries: Count = 0
    fail_loads: list[Count] = []
    fail_stores: list[Count] = []
    request_level: bool = False


class OffloadSpec(Struct, frozen=True, forbid_unknown_fields=True):
    cpu_chunks: Annotated[int, Meta(ge=0, le=10_000_000)]
    blocks_per_chunk: Positive | None = None
    block_size: Positive | None = None
    eviction_policy: Literal["lru", "arc"] = "lru"
    store_threshold: Count = 0
    max_tracker_size: Count = 64_000
    offload_prompt_only: bool = True
    sync_load_budget_tokens: Count = 0
    workers: Positive = 1
    store_delay: Delay = 0
    load_delay: Delay = 0
    job_delay: dict[str, Delay] = {}
    rank_delay: list[Count] = []
    tiers: list[TierSpec] | None = None
    multi: list[Literal["offload", "scripted"]] = []


class OffloadRequestSpec(RequestSpec, frozen=True, kw_only=True, forbid_unknown_fields=True):
    store_delay: Delay | None = None
    load_delay: Delay | None = None
    kv_params: dict[str, Json] | None = None
    skip_read: bool = False


class OffloadEvent(StepEvent, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reset_connector: bool = False


class OffloadWorkload(Struct, frozen=True, forbid_unknown_fields=True):
    engine: EngineSpec
    offload: OffloadSpec
    requests: list[OffloadRequestSpec]
    events: list[OffloadEvent] = []
    name: str = ""
    note: str = ""
    max_steps: Positive = 200
    idle_limit: Positive = 8

    @property
    def groups(self) -> Sequence[GroupSpec]:
        return self.engine.groups or [GroupSpec()]


Tables = list[list[int]]


class RequestRow(Struct, frozen=True, array_like=True):
    """`[status, num_computed, num_tokens, preemptions, tables]`."""

    status: str
    num_computed: int
    num_tokens: int
    num_preemptions: int
    tables: Tables


class After(Struct, frozen=True):
    running: list[str] = []
    waiting: list[str] = []
    kvhold: list[str] = []
    req: dict[str, RequestRow] = {}


class ShareRow(Struct, frozen=True, array_like=True):
    """`[id, computed before, tokens, tables | new blocks]`."""

    request_id: str
    num_computed: int
    num_tokens: int
    blocks: Tables | None


class LoadRow(Struct, frozen=True, array_like=True):
    """`[job, id, external tokens, queue, keys, CPU chunks, GPU blocks, blocks per group, first block per group]`."""

    job_id: int
    request_id: str
    num_external: int
    queue: str
    keys: list[str]
    chunk_ids: list[int]
    block_ids: list[int]
    group_sizes: list[int]
    block_indices: list[int]


Finish: TypeAlias = Literal["stop", "length", "error"]


class OutputRow(Struct, frozen=True, array_like=True):
    request_id: str
    tokens: list[int]
    finish: Finish | None


class RecordedStep(Struct, frozen=True):
    """What the scheduler did in a step."""

    k: int
    add: list[str] = []
    lookup: list[tuple[str, int, int | None, bool, list[Json]]] = []
    load: list[LoadRow] = []
    alloc2: list[tuple[str, int, Tables]] = []
    new: list[ShareRow] = []
    resumed: list[ShareRow] = []
    run: list[ShareRow] = []
    preempted: list[str] = []
    fin_prev: list[str] = []
    cow: list[tuple[int, int]] = []
    evict: list[int] = []
    reset: bool | None = None
    boundary: dict[str, list[tuple[int, int, int]]] = {}
    out: list[OutputRow] = []
    upd_of: list[str] | None = None
    total: int = 0
    error: dict[str, Json] | None = None
    after: After = field(default_factory=After)


def read_offload_workload(document: Json) -> OffloadWorkload:
    """Raises ConfigError for what is wrong with it, UnsupportedVectorError for what nobody here knows."""
    try:
        workload = msgspec.convert(document, OffloadWorkload)
    except msgspec.ValidationError as error:
        if "unknown field" in str(error):
            raise UnsupportedVectorError(f"workload: {error}") from error
        raise ConfigError(f"workload: {error}") from error
    if workload.engine.hisparse_host_blocks is not None or workload.engine.spec is not None:
        raise UnsupportedVectorError("speculative decoding or HiSparse together with offloading")
    return workload


def read_recorded_steps(document: Json) -> list[RecordedStep]:
    try:
        return msgspec.convert(document, list[RecordedStep])
    except msgspec.ValidationError as error:
        raise ConfigError(f"steps: {error}") from error


# -- the layout -----------------------------------------------------------------------------------------------

_KINDS: Final[Mapping[str, str]] = {
    "full": FULL,
    "mla": FULL,
    "swa": SLIDING_WINDOW,
    "swa_mla": SLIDING_WINDOW,
    "chunked_local": CHUNKED_LOCAL,
    "mamba": MAMBA,
}


def layout_of(workload: OffloadWorkload, tokens_per_hash: int) -> OffloadLayout:
    """A group that the prefix cache leaves out is not offloaded either."""
    engine, offload = workload.engine, workload.offload
    blocks_per_chunk = _blocks_per_chunk(workload)
    groups = tuple(
        _group(index, group, engine.block_size, blocks_per_chunk)
        for index, group in enumerate(workload.groups)
        if group.type in _KINDS and not group.bounded_replay
    )
    return OffloadLayout(
        groups=groups,
        tokens_per_hash=tokens_per_hash,
        num_workers=offload.workers,
        retention_interval=engine.retention_interval,
        sync_load_budget=offload.sync_load_budget_tokens,
        offload_prompt_only=offload.offload_prompt_only,
        enable_prefix_caching=engine.enable_prefix_caching,
    )


def _blocks_per_chunk(workload: OffloadWorkload) -> int:
    offload = workload.offload
    if offload.block_size is None:
        return offload.blocks_per_chunk or 1
    sizes = {group.block_size or workload.engine.block_size for group in workload.groups}
    if len(sizes) != 1 or offload.block_size % min(sizes):
        raise ConfigError("workload: offload.block_size must be a multiple of the one block size of all groups")
    return offload.block_size // sizes.pop()


def _group(index: int, group: GroupSpec, block_size: int, blocks_per_chunk: int) -> OffloadGroup:
    kind = _KINDS[group.type]
    return OffloadGroup(
        group_id=index,
        kind=kind,
        tokens_per_block=group.block_size or block_size,
        blocks_per_chunk=blocks_per_chunk,
        window=group.chunk if kind == CHUNKED_LOCAL else group.sliding_window if kind == SLIDING_WINDOW else None,
        extra_retained_tokens=group.extra_retained,
        is_aligned_state=kind == MAMBA and group.mode == "align",
        is_drafter=group.eagle,
    )
