"""Trace schema, version 1: columns and file metadata (design §5)."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from zlib import crc32

import pyarrow as pa

from kvreplay import __version__
from kvreplay.events import SCHEMA_VERSION

# Arrow's own allocator keeps what it has had; the system's gives it back when asked (`release_memory`).
pa.set_memory_pool(pa.system_memory_pool())

DICTIONARY: Final = pa.dictionary(pa.int32(), pa.string())
"""Strings repeat a lot: each row group has its own dictionary, in order of first appearance."""

SCHEMA: Final = pa.schema(
    [
        pa.field("seq", pa.uint64(), nullable=False),
        pa.field("time_ns", pa.int64(), nullable=False),
        pa.field("instance", DICTIONARY),
        pa.field("step", pa.int64()),
        pa.field("kind", DICTIONARY, nullable=False),
        pa.field("request_id", DICTIONARY),
        pa.field("transfer_id", DICTIONARY),
        pa.field("peer", DICTIONARY),
        pa.field("rank", pa.int16()),
        pa.field("group", pa.int16()),
        pa.field("block_ids", pa.list_(pa.int32())),
        pa.field("num_tokens", pa.int64()),
        pa.field("num_blocks", pa.int64()),
        pa.field("status", DICTIONARY),
        pa.field("cause", DICTIONARY),
        pa.field("cause_seq", pa.uint64()),
        pa.field("prompt_tokens", pa.int32()),
        pa.field("output_tokens", pa.int32()),
        pa.field("priority", pa.int32()),
        pa.field("prefix_hashes", pa.list_(pa.uint64())),
        pa.field("prefix_hash_tokens", pa.int32()),
        pa.field("output_hash", pa.uint64()),
        pa.field("params", DICTIONARY),
    ]
)

REQUIRED: Final = tuple(column.name for column in SCHEMA if not column.nullable)
"""Columns without nulls."""

STRINGS: Final = tuple(column.name for column in SCHEMA if column.type == DICTIONARY)

MEMORY_SCHEMA: Final = pa.schema(
    [
        pa.field(column.name, pa.string() if column.type == DICTIONARY else column.type, column.nullable)
        for column in SCHEMA
    ]
)
"""The same rows with plain strings: what is sorted, hashed and handed to polars."""


def release_memory() -> None:
    """Give back to the operating system what reading or writing rows has left free."""
    pa.default_memory_pool().release_unused()


METADATA_KEYS: Final = ("source", "t0_unix_ns", "config", "seed", "faults", "profile")
CHECKSUM: Final = "checksum"


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceMetadata:
    """What a trace says about itself. No paths and no wall-clock time, so that equal runs give equal bytes."""

    source: Mapping[str, Any]
    """`tool`, `options` that the result depends on, `inputs`: hashes of the files it was made from."""
    t0_unix_ns: int | None = None
    """The instant 0 of a recording."""
    config: Mapping[str, Any] | None = None
    seed: int | None = None
    faults: Sequence[Any] | None = None
    profile: str | None = None
    kvreplay_version: str = __version__
    schema_version: int | str = SCHEMA_VERSION
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Keys that this version does not know, as found."""

    def encode(self) -> dict[bytes, bytes]:
        """Parquet key-value metadata: JSON under each key."""
        values: dict[str, Any] = {
            "schema_version": self.schema_version,
            "kvreplay_version": self.kvreplay_version,
            **{key: getattr(self, key) for key in METADATA_KEYS},
            **self.extra,
        }
        texts = {key.encode(): canonical_json(value).encode() for key, value in values.items()}
        return {**texts, CHECKSUM.encode(): metadata_checksum(texts)}


def metadata_checksum(texts: Mapping[bytes, bytes]) -> bytes:
    """CRC-32, as JSON, of what a run depends on: Parquet has checksums of pages, and none of what the footer says."""
    return str(crc32(b"\n".join(texts.get(key.encode(), b"") for key in METADATA_KEYS))).encode()


def canonical_json(value: Any) -> str:  # noqa: ANN401 - JSON is whatever it is
    """JSON text that depends on nothing but the value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
