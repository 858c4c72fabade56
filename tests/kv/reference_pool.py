"""A block pool that is obviously right: lists and dicts, one block at a time, as vLLM's block_pool.py is described."""

from collections.abc import Iterable, Sequence


class ReferencePool:
    """Blocks 1 … num_blocks - 1; block 0 is the null block and takes part in nothing."""

    def __init__(self, num_blocks: int, *, enable_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_caching = enable_caching
        self.free = list(range(1, num_blocks))
        """Next to be reused first."""
        self.ref_counts = dict.fromkeys(range(1, num_blocks), 0)
        self.key_of: dict[int, int] = {}
        self.holders: dict[int, list[int]] = {}
        """Key → blocks that hold it, in order of insertion."""
        self.evicted: list[int] = []
        """Blocks that lost their hash to reuse, in order."""

    def get_new_blocks(self, count: int) -> list[int]:
        taken, self.free = self.free[:count], self.free[count:]
        for block_id in taken:
            if block_id in self.key_of:
                self.evicted.append(block_id)
                self._forget(block_id)
            self.ref_counts[block_id] = 1
        return taken

    def touch(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self.ref_counts[block_id] == 0:
                self.free.remove(block_id)
            self.ref_counts[block_id] += 1

    def free_blocks(self, ordered: Iterable[int]) -> None:
        uncached: list[int] = []
        cached: list[int] = []
        for block_id in ordered:
            if block_id == 0:
                continue
            self.ref_counts[block_id] -= 1
            if self.ref_counts[block_id] == 0:
                (cached if block_id in self.key_of else uncached).append(block_id)
        self.free = uncached + self.free + cached

    def cache(self, block_ids: Sequence[int], keys: Sequence[int]) -> None:
        for block_id, key in zip(block_ids, keys, strict=True):
            self.key_of[block_id] = key
            self.holders.setdefault(key, []).append(block_id)

    def find(self, keys: Iterable[int]) -> list[int]:
        return [self.holders[key][0] if key in self.holders else 0 for key in keys]

    def find_prefix(self, keys: Iterable[int]) -> list[int]:
        found: list[int] = []
        for block_id in self.find(keys):
            if not block_id:
                break
            found.append(block_id)
        return found

    def evict_blocks(self, block_ids: Iterable[int]) -> list[int]:
        had_one = [block_id for block_id in dict.fromkeys(block_ids) if block_id in self.key_of]
        for block_id in had_one:
            self._forget(block_id)
        return had_one

    def reset(self) -> bool:
        if any(self.ref_counts.values()):
            return False
        self.key_of.clear()
        self.holders.clear()
        return True

    def _forget(self, block_id: int) -> None:
        key = self.key_of.pop(block_id)
        self.holders[key].remove(block_id)
        if not self.holders[key]:
            del self.holders[key]
