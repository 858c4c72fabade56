"""What the connector's halves tell each other, and what the engine tells it of a step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from kvreplay.connectors.offloading.arrays import ChunkIds
from kvreplay.connectors.offloading.request_state import BlocksOfGroups
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.kv.prefix_cache import BlockIds


class GpuBlocks(NamedTuple):
    """The GPU side of a copy (vLLM: GPULoadStoreSpec): ids of all groups in one list, group after group.

    `block_indices`: where each group's first block stands in its request's table, which says how much of the first
    chunk is skipped.
    """

    block_ids: BlockIds
    group_sizes: tuple[int, ...]
    block_indices: tuple[int, ...]


class TransferJob(NamedTuple):
    """One copy between GPU blocks and CPU chunks; chunks group after group, too."""

    job_id: int
    req_id: str
    is_store: bool
    gpu: GpuBlocks
    chunk_ids: ChunkIds
    is_sync: bool = False
    """The step that starts it waits for it."""
    failure: str | None = None
    """A load that can only fail, and why: what it was to bring has gone."""


@dataclass(slots=True)
class OffloadingConnectorMetadata:
    """One step's orders to the workers."""

    load_jobs: dict[int, TransferJob] = field(default_factory=dict)
    store_jobs: dict[int, TransferJob] = field(default_factory=dict)
    jobs_to_flush: set[int] = field(default_factory=set)
    """To be submitted at once and waited for. A set of numbers, as in vLLM: its order is the order of submission."""
    has_forward: bool = True
    """Whether the step computes anything."""

    def __bool__(self) -> bool:
        return bool(self.load_jobs or self.store_jobs or self.jobs_to_flush)


@dataclass(slots=True)
class OffloadingOutput(KVConnectorOutput):
    """A step's reports, with the jobs that ended."""

    completed_jobs: dict[int, int] = field(default_factory=dict)
    """Job → workers that report it now."""
    failed_jobs: dict[int, str] = field(default_factory=dict)
    """Of those, the ones whose copy failed, and why. Only where failures are survived."""

    def __bool__(self) -> bool:
        # Not super(): a slots dataclass is made anew.
        return bool(self.completed_jobs) or KVConnectorOutput.__bool__(self)


class StepRequest(NamedTuple):
    """One request's share of a step.

    `blocks`: per KV cache group of the engine, its whole table or what it got now. `shared_prefix_boundary`: where it
    leaves what others have cached, if sparse groups hold nothing there; 0 for nowhere.
    """

    request_id: str
    num_computed_tokens: int
    num_scheduled_tokens: int
    blocks: BlocksOfGroups | None
    is_full_table: bool = False
    """With `blocks` None: the table that it was admitted with."""
    shared_prefix_boundary: int = 0


class Handoff(NamedTuple):
    """A recurrent state that is complete in this step: `block_id` holds that of the first `boundary` tokens."""

    group_id: int
    block_id: int
    boundary: int


@dataclass(slots=True)
class OffloadStep:
    """What a `schedule()` decided, as far as the connector cares; requests in scheduling order."""

    requests: Sequence[StepRequest] = ()
    preempted: Sequence[str] = ()
    finished: Sequence[str] = ()
    """Ended since the last step."""
    copied_to: Sequence[int] = ()
    """Destinations of copy-on-write."""
    handoffs: Mapping[str, Sequence[Handoff]] = field(default_factory=dict)
    has_forward: bool = True
