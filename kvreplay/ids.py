"""Names for identifiers and units that cross package boundaries, and how units are converted and counted."""

from typing import TypeAlias

InstanceId: TypeAlias = str
BlockId: TypeAlias = int

NULL_BLOCK_ID: BlockId = 0
"""The placeholder block: in every pool, in many tables, never allocated, freed, cached or written."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000


def nanoseconds(seconds: float) -> int:
    """To the nearest one: what a configuration or a file says in seconds, as all times within kvreplay."""
    return round(seconds * NS_PER_S)


def plural(count: int, noun: str) -> str:
    """`1 request`, `1,200 requests`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
