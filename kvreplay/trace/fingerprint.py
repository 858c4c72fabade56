"""The fingerprint of a trace: a hash of what every detail level writes."""

from hashlib import blake2b
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvreplay.events import DETAIL_RUN, KINDS
from kvreplay.trace.schema import MEMORY_SCHEMA

RUN_KINDS: Final = tuple(kind for kind, spec in KINDS.items() if spec.detail == DETAIL_RUN)
FINGERPRINT_KINDS: Final = tuple(kind for kind in RUN_KINDS if kind != "run.summary")
"""Without the summary: it contains the fingerprint."""

FINGERPRINT_COLUMNS: Final = tuple(name for name in MEMORY_SCHEMA.names if name not in ("seq", "cause_seq"))
"""Without row numbers: they depend on how many rows of finer detail lie between."""


class Fingerprint:
    """Takes rows in order, in pieces of any size.

    Each column is a few byte streams (which rows have a value; lengths; values), and each stream has its own
    hash, so that where one piece ends leaves no mark. A column without any value counts as absent: files from
    before it was added keep their fingerprint.
    """

    def __init__(self) -> None:
        self._num_rows = 0
        self._streams: dict[tuple[str, str], blake2b] = {}

    def update(self, table: pa.Table) -> None:
        """Add the rows of `table` (MEMORY_SCHEMA) that count; the others are skipped."""
        table = table.filter(pc.is_in(table["kind"], pa.array(FINGERPRINT_KINDS)))
        for name in FINGERPRINT_COLUMNS:
            column = table[name].combine_chunks()
            if column.null_count < len(column):
                self._add(name, column)
        self._num_rows += len(table)

    def _add(self, name: str, column: pa.Array) -> None:
        rows = np.flatnonzero(column.is_valid().to_numpy(zero_copy_only=False)) + self._num_rows
        self._feed(name, "rows", rows.astype("<i8"))
        values = column.drop_null()
        if pa.types.is_integer(values.type):
            self._feed(name, "values", values.to_numpy())
            return
        self._feed(name, "lengths", np.diff(_offsets(values)).astype("<i4"))
        if pa.types.is_list(values.type):
            self._feed(name, "values", values.flatten().to_numpy())
        else:
            self._feed(name, "values", _text(values))

    def _feed(self, name: str, stream: str, data: NDArray[np.generic]) -> None:
        key = (name, stream)
        if key not in self._streams:
            self._streams[key] = blake2b(digest_size=16)
        if data.dtype.kind in "iu" and data.dtype.itemsize > 1:
            data = data.astype(data.dtype.newbyteorder("<"), copy=False)
        self._streams[key].update(np.ascontiguousarray(data).data)

    def hexdigest(self) -> str:
        total = blake2b(str(self._num_rows).encode(), digest_size=8)
        for (name, stream), digest in sorted(self._streams.items()):
            total.update(f"{name}.{stream}:".encode() + digest.digest())
        return total.hexdigest()


def _offsets(values: pa.Array) -> NDArray[np.int32]:
    offsets = np.frombuffer(values.buffers()[1], np.int32)
    return offsets[values.offset : values.offset + len(values) + 1]


def _text(values: pa.StringArray) -> NDArray[np.uint8]:
    data = values.buffers()[2]
    offsets = _offsets(values)
    return np.frombuffer(data, np.uint8)[offsets[0] : offsets[-1]] if data else np.zeros(0, np.uint8)
