"""What either way of storing answers: as requests compute (`EagerStores`), or as blocks will be lost (`LazyStores`)."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvreplay.connectors.simple_cpu.structs import Pairs
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request


@dataclass(slots=True)
class StoreCounts:
    """vLLM's BoundaryStoreStats, in short, and blocks of tables that found no room."""

    handed_over: int = 0
    stored_states: int = 0
    refused: int = 0
    """Offers for which there was no room: states are not offered again, blocks of tables are."""


class Stores(Protocol):
    """`in_flight`: blocks of the GPU that are being stored."""

    in_flight: set[int]
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
