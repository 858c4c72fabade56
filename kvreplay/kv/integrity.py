"""Checksums of blocks on their way between memories, and what a corruption does to a block: the two must fit."""

import numpy as np

from kvreplay.kv.content import WordArray

_MIX = np.uint64(0x9E3779B97F4A7C15)


def checksums(words: WordArray) -> WordArray:
    """One word per block (shape [number of blocks, number of words]) that any change of the block changes."""
    ramp = _ramp(words.shape[1])
    mixed = (words ^ ramp) * _MIX
    mixed ^= mixed >> np.uint64(29)
    sums: WordArray = (mixed * (ramp | np.uint64(1))).sum(axis=1, dtype=np.uint64)
    return sums


def damage_mask(draw: int, num_words: int) -> WordArray:
    """What to xor a block with. Every word of it changes, so that no part stays usable by luck."""
    mask: WordArray = (_ramp(num_words) ^ np.uint64(draw & 0xFFFF_FFFF_FFFF_FFFF)) | np.uint64(1)
    return mask


def _ramp(num_words: int) -> WordArray:
    ramp: WordArray = np.arange(1, num_words + 1, dtype=np.uint64) * _MIX
    return ramp
