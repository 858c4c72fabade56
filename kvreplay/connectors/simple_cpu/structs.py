"""What the halves tell each other."""

from dataclasses import dataclass, field
from typing import NamedTuple

from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.kv.block_pool import BlockIds


class CopyJob(NamedTuple):
    """Blocks of one request, one for one. The copy thread works in the order of the numbers."""

    number: int
    req_id: str
    is_store: bool
    gpu_blocks: BlockIds
    cpu_blocks: BlockIds


class FoundBlocks(NamedTuple):
    """Payload of a lookup that has found something. `evicts`: what nobody holds of it is gone right after."""

    req_id: str
    evicts: bool = False


@dataclass(slots=True)
class SimpleCpuMetadata:
    """One step's orders."""

    loads: list[CopyJob]
    stores: list[CopyJob]
    must_flush: bool
    """Somebody has lost its blocks: whatever is under way ends before they are written to."""


@dataclass(slots=True)
class SimpleCpuOutput(KVConnectorOutput):
    """`done`: jobs that ended, in order; `failed`: those of them that did not copy, and why."""

    done: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.done)
