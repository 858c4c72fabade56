"""What either way of storing answers: as requests compute (`EagerStores`), or as blocks will be lost (`LazyStores`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvreplay.connectors.simple_cpu.structs import Pairs
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request
from kvreplay.kv.block_pool import BlockPool


@dataclass(slots=True)
class StoreCounts:
    """vLLM's BoundaryStoreStats, in short, and blocks of tables that found no room."""

    handed_over: int = 0
    stored_states: int = 0
    refused: int = 0
    """Offers for which there was no room: states are not offered again, blocks of tables are."""


def take(pairs: Pairs, chosen: Sequence[tuple[int, int]], gpu: BlockPool, cpu: BlockPool) -> None:
    """Give each block of the GPU (group, block) a place in the CPU's pool, and hold it until it is there."""
    for (group, block_id), cpu_block in zip(chosen, cpu.get_new_blocks(len(chosen)).tolist(), strict=True):
        pairs.add(group, block_id, cpu_block)
    # A table that is out of date may name a block twice.
    block_ids = np.array([block_id for _, block_id in chosen], np.int64)
    once, first = np.unique(block_ids, return_index=True)
    gpu.touch(once)
    np.add.at(gpu.ref_counts, np.delete(block_ids, first), 1)


class Stores(Protocol):
    counts: StoreCounts

    @property
    def needs_shares(self) -> bool:
        """Whether every step of every request must be shown."""
        ...

    @property
    def has_more(self) -> bool:
        """Whether the next step must be a real one, also if requests do nothing but decode."""
        ...

    def note_uneventful(self) -> None:
        """As `SchedulerConnector.note_uneventful`."""
        ...

    def follow(self, request: Request) -> None: ...

    def forget(self, req_id: str) -> None: ...

    def forget_all(self) -> None: ...

    def of_step(self, out: SchedulerOutput) -> tuple[Pairs, list[str]]:
        """What is stored, with its place in the CPU's pool, and whose it is."""
        ...

    def at_end(self, request: Request, tables: Sequence[Sequence[int]]) -> Pairs:
        """What a request that ends has left to store; `tables`: its blocks now."""
        ...

    def note_ended(self, pairs: Pairs) -> None:
        """These are no longer on their way."""
        ...
