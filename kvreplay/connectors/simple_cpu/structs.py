"""What the halves tell each other (vLLM: simple_kv_offload/metadata.py)."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.kv.prefix_cache import BlockIds


class Pairs:
    """Blocks of the GPU and of the CPU, one for one, in order, with the group that each belongs to."""

    __slots__ = ("cpu", "gpu", "groups")

    def __init__(self) -> None:
        self.groups: list[int] = []
        self.gpu: list[int] = []
        self.cpu: list[int] = []

    def __len__(self) -> int:
        return len(self.gpu)

    def add(self, group: int, gpu_block: int, cpu_block: int) -> None:
        self.groups.append(group)
        self.gpu.append(gpu_block)
        self.cpu.append(cpu_block)

    def extend(self, other: "Pairs") -> None:
        self.groups += other.groups
        self.gpu += other.gpu
        self.cpu += other.cpu

    @property
    def gpu_ids(self) -> BlockIds:
        return np.array(self.gpu, np.int64)

    @property
    def cpu_ids(self) -> BlockIds:
        return np.array(self.cpu, np.int64)

    def by_group(self) -> Iterator[tuple[int, BlockIds, BlockIds]]:
        groups, gpu, cpu = np.array(self.groups, np.int64), self.gpu_ids, self.cpu_ids
        for group in sorted(set(self.groups)):
            chosen = groups == group
            yield group, gpu[chosen], cpu[chosen]


class CopyEvent(NamedTuple):
    """All that one step copies in one direction: events of a direction are done in the order of their numbers.

    `req_ids`: of a load, who waits for it; of a store, whose blocks it has taken.
    """

    number: int
    is_store: bool
    req_ids: tuple[str, ...]
    pairs: Pairs


class FoundBlocks(NamedTuple):
    """Payload of a lookup that has found something. `evicts`: what nobody holds of it is gone right after."""

    req_id: str
    evicts: bool = False


@dataclass(slots=True)
class SimpleCpuMetadata:
    """One step's orders."""

    load: CopyEvent | None
    store: CopyEvent | None
    must_flush: bool
    """Somebody has lost its blocks: whatever is under way ends before they are written to."""


@dataclass(slots=True)
class SimpleCpuOutput(KVConnectorOutput):
    """`stored`: stores that ended, in order; `failed`: those of them that did not copy, and why."""

    stored: list[int] = field(default_factory=list)
    failed: dict[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.stored) or KVConnectorOutput.__bool__(self)
