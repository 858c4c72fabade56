"""Names for identifiers and units that cross package boundaries."""

from typing import TypeAlias

RequestId: TypeAlias = str
InstanceId: TypeAlias = str
TransferId: TypeAlias = str
BlockId: TypeAlias = int

NULL_BLOCK_ID: BlockId = 0
"""The placeholder block: in every pool, in many tables, never allocated, freed, cached or written."""

NS_PER_US = 1_000
NS_PER_MS = 1_000_000
NS_PER_S = 1_000_000_000
