"""Offload keys: what a chunk in the CPU tier is called.

vLLM's key is the hash of the chunk's last hash block and the group's index (v1/kv_offload/base.py, make_offload_key).
Hashes are chained, so a key names a whole prefix, and with it the position at which that prefix ends. Ours is a dense
integer of the same meaning: `block key * num_groups + group`.
"""

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.offloading.arrays import NO_KEYS, Keys, Marks, Mask, grown
from kvreplay.kv.allocation import lazy_zeros
from kvreplay.kv.content import KeyArray


class KeySpace:
    """Makes keys, and remembers where each one's prefix ends. A position of 0 is not known.

    `num_block_keys`: how many there will be, as far as that is known. `names`: what each block key is known by; None:
    by itself.
    """

    def __init__(self, num_groups: int, num_block_keys: int = 0, names: KeyArray | None = None) -> None:
        assert num_groups > 0
        self._names = names
        self.num_groups = num_groups
        self.num_keys = max(num_block_keys * num_groups, 1024)
        self._use_positions(lazy_zeros(self.num_keys))
        self._marks = Marks(self.num_keys)
        self._last: tuple[Keys, NDArray[np.int64]] = NO_KEYS, NO_KEYS
        """Of whom the positions were asked for last: several parties ask about the same."""
        self._run: Keys | None = None
        self._ends: dict[int, NDArray[np.int64]] = {}

    def make(self, block_keys: KeyArray, group: int, ends: NDArray[np.int64]) -> Keys:
        """The keys of the prefixes whose last hash blocks are `block_keys`; `ends`: their tokens."""
        if self._names is not None:
            block_keys = self._names[block_keys]
        keys: Keys = block_keys if self.num_groups == 1 else block_keys * self.num_groups + group
        self.note(keys, ends)
        return keys

    def _use_positions(self, positions: NDArray[np.int32]) -> None:
        self._positions = positions
        self._position_of = positions.data
        """The same for single keys."""

    def make_one(self, block_key: int, group: int, end: int) -> int:
        """`make` for a single key."""
        if self._names is not None:
            block_key = self._names.item(block_key)
        key = block_key * self.num_groups + group
        if key >= len(self._positions):
            self._use_positions(grown(self._positions, key))
        self._position_of[key] = end
        self._last = NO_KEYS, NO_KEYS
        return key

    def note(self, keys: Keys, ends: NDArray[np.int64]) -> None:
        try:
            self._positions[keys] = ends
        except IndexError:
            self._use_positions(grown(self._positions, int(keys.max())))
            self._positions[keys] = ends
        self._last = NO_KEYS, NO_KEYS

    def ends(self, count: int, size: int) -> NDArray[np.int64]:
        """Where the first so many chunks of `size` tokens end. To be read only."""
        ends = self._ends.get(size)
        if ends is None or len(ends) < count:
            ends = self._ends[size] = np.arange(1, 2 * count + 64) * size
        return ends[:count]

    def note_run(self, keys: Keys, positions: NDArray[np.int64]) -> None:
        """These are about to be asked for: of one group, in the order of their positions, which are the noted ones."""
        self._last = keys, positions
        self._run = keys

    def is_run(self, keys: Keys) -> bool:
        """Whether this very array is what `note_run` was last told of."""
        return keys is self._run

    def positions(self, keys: Keys) -> NDArray[np.int64]:
        last, positions = self._last
        if last is not keys:
            positions = self._find_positions(keys)
            self._last = keys, positions
        return positions

    def _find_positions(self, keys: Keys) -> NDArray[np.int64]:
        try:
            return self._positions[keys].astype(np.int64)
        except IndexError:  # keys that nobody has made here
            self._use_positions(grown(self._positions, int(keys.max())))
            return self._positions[keys].astype(np.int64)

    def groups(self, keys: Keys) -> NDArray[np.int64]:
        return keys % self.num_groups

    def not_among(self, keys: Keys, others: Keys) -> Mask:
        """Which of `keys` are not in `others`."""
        if not len(keys) or not len(others):
            return np.ones(len(keys), np.bool_)
        self._marks.fill(others)
        return ~self._marks.holds(keys)

    def in_prefix_order(self, keys: Keys) -> Keys:
        """Head to tail over all groups, ties by group. Keys without a position keep their place within the group."""
        positions = self.positions(keys)
        if len(keys) and positions[0] and (positions[1:] > positions[:-1]).all():
            return keys
        groups = self.groups(keys)
        if positions.all():
            return keys[np.lexsort((groups, positions))]
        of_group = (keys[groups == group] for group in range(self.num_groups))
        return np.concatenate([self._in_order_of_group(part) for part in of_group])

    def _in_order_of_group(self, keys: Keys) -> Keys:
        positions = self.positions(keys)
        return keys[np.argsort(positions, kind="stable")] if positions.all() else keys
