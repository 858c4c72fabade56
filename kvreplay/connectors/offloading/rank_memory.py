"""One rank's part of an engine's rows, where the rows of all ranks are kept next to each other."""

from collections.abc import Mapping, Sequence

from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import BlockIds, History, KVMemory, Provenance


class RankMemory:
    """Columns of each block: `first` and `width` count a group's blocks' words, `words[g]` each."""

    def __init__(self, memory: KVMemory, first: int, width: int, words: Sequence[int]) -> None:
        self._memory = memory
        self._columns = [slice(first * count, (first + width) * count) for count in words]

    def read_blocks(self, group: int, block_ids: BlockIds) -> WordArray:
        part: WordArray = self._memory.read_blocks(group, block_ids)[:, self._columns[group]]
        return part

    def write_blocks(self, group: int, block_ids: BlockIds, words: WordArray, *, provenance: Provenance | None) -> None:
        rows = self._memory.read_blocks(group, block_ids)
        rows[:, self._columns[group]] = words
        self._memory.write_blocks(group, block_ids, rows, provenance=provenance)

    def mark_corrupted(self, block_id: int, provenance: Provenance) -> None:
        self._memory.mark_corrupted(block_id, provenance)

    def histories(self, block_ids: BlockIds) -> Mapping[int, History]:
        return self._memory.histories(block_ids)

    def set_history(self, block_id: int, history: History) -> None:
        self._memory.set_history(block_id, history)
