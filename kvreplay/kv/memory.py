"""The memory that connectors move KV between: what they may ask of an instance's buffers."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kvreplay.kv.content import WordArray

BlockIds: TypeAlias = Sequence[int] | NDArray[np.int64]


class Provenance(NamedTuple):
    """Where foreign words in a block came from, so that a finding can name it."""

    transfer_id: str
    request_id: str
    """The request for which they were sent."""
    fault_spec: str = ""
    fault_handle: int = -1
    asked_for: bool = False
    """Whoever asked for them waits for them still; so they are as right as the blocks are still the request's."""


class History(NamedTuple):
    """Who is to blame for what a block holds, as one memory may hand it to another."""

    provenance: Provenance | None
    origin: object | None
    """Where it began: known to whoever reads blocks."""


class KVMemory(Protocol):
    """One rank's KV blocks, per KV cache group a row of words each."""

    def read_blocks(self, group: int, block_ids: BlockIds) -> WordArray:
        """The blocks' words now, as a copy of shape [number of blocks, block size]."""
        ...

    def write_blocks(self, group: int, block_ids: BlockIds, words: WordArray, *, provenance: Provenance | None) -> None:
        """Overwrite whole blocks. `provenance` None: for whoever holds them."""
        ...

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        """A fault has changed what was just written to this block."""
        ...

    def histories(self, block_ids: BlockIds) -> Mapping[int, History]:
        """Of these blocks those that are known to hold wrong contents."""
        ...

    def set_history(self, block_id: int, history: History) -> None:
        """What was just written to this block is wrong, and this is known of it."""
        ...


class NullMemory:
    """No contents: for runs that do not check them."""

    def read_blocks(self, group: int, block_ids: BlockIds) -> WordArray:
        return np.empty((len(block_ids), 0), dtype=np.uint64)

    def write_blocks(self, group: int, block_ids: BlockIds, words: WordArray, *, provenance: Provenance | None) -> None:
        pass

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        pass

    def histories(self, block_ids: BlockIds) -> Mapping[int, History]:
        return {}

    def set_history(self, block_id: int, history: History) -> None:
        pass
