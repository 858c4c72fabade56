"""How often each key has been offered: chunks are stored only from the n-th offer on (`store_threshold`)."""

from collections import OrderedDict

import numpy as np

from kvreplay.connectors.offloading.arrays import Keys, Mask


class OfferCounts:
    """Counts of at most `max_size` keys, the least recently offered forgotten first. Survives a reset."""

    def __init__(self, threshold: int, max_size: int) -> None:
        self.threshold = threshold
        self.max_size = max_size
        self.counts: OrderedDict[int, int] = OrderedDict()

    def note(self, keys: Keys) -> None:
        """One offer. It never displaces its own keys."""
        counts = self.counts
        offered = keys.tolist()
        known = [key for key in offered if key in counts]
        for key in known:
            counts.move_to_end(key)
            counts[key] += 1
        num_displaceable = len(counts) - len(set(known))
        for key in offered:
            if key in counts:
                continue
            if len(counts) >= self.max_size:
                if not num_displaceable:
                    continue
                counts.popitem(last=False)
                num_displaceable -= 1
            counts[key] = 1

    def admits(self, keys: Keys) -> Mask:
        """Which of these candidates have been offered often enough."""
        return np.array([self.counts.get(key, 0) >= self.threshold for key in keys.tolist()], np.bool_)
