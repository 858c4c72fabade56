"""What a scheduler tells whoever models the contents of blocks."""

from collections.abc import Sequence
from typing import Protocol

from kvreplay.engine.request import Request
from kvreplay.kv.prefix_cache import BlockIds


class ContentsModel(Protocol):
    """Called in the middle of what the scheduler does; it must leave the scheduler as it is."""

    def flush(self, request: Request, *, is_over: bool = False) -> None:
        """A decoding request's counters are up to date, and what it has computed must be there: it leaves lockstep,
        or is about to give back or hash blocks. `is_over`: it gives all of them back right away."""
        ...

    def zero(self, block_ids: list[int]) -> None:
        """Blocks are emptied before the next step that is scheduled openly."""
        ...

    def on_parked(self, request: Request) -> None:
        """A load into its blocks begins."""
        ...

    def on_promoted(self, request: Request) -> None:
        """Its load is over, and what has been loaded is not hashed yet."""
        ...

    def on_blocks_freed(self, request: Request, freed: Sequence[BlockIds]) -> None:
        """`freed`: per group."""
        ...
