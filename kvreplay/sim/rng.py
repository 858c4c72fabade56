"""Seeded randomness: one generator per named part, and stateless draws for faults."""

from hashlib import blake2b
from random import Random


def stable_hash(*parts: str | int) -> int:
    """64 bits that depend on nothing but `parts`: not on the process, not on earlier draws."""
    digest = blake2b("\x1f".join(str(part) for part in parts).encode(), digest_size=8)
    return int.from_bytes(digest.digest(), "little")


def generator(seed: int, part: str) -> Random:
    """The generator of one part of a run. Adding a part leaves the others' draws as they were."""
    return Random(stable_hash(seed, part))


def decides(probability: float, *key: str | int) -> bool:
    """Whether the event with this key happens: a pure function of the key, so that order does not matter."""
    return stable_hash(*key) < probability * 2.0**64
