"""Events to columns: transposing, ordering and numbering them."""

from collections.abc import Sequence
from itertools import repeat
from operator import is_
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from kvreplay.events import KINDS, Event
from kvreplay.trace.schema import MEMORY_SCHEMA

HANDLE: Final = "handle"
CAUSE_HANDLE: Final = "cause_handle"

EVENT_SCHEMA: Final = pa.schema(
    [
        *(MEMORY_SCHEMA.field(name) for name in MEMORY_SCHEMA.names if name not in ("seq", "cause_seq")),
        pa.field(HANDLE, pa.int64(), nullable=False),
        pa.field(CAUSE_HANDLE, pa.int64()),
    ]
)
"""Rows that have no number yet: events name each other by handle."""

_NO_STEP: Final = np.iinfo(np.int64).min


NUM_FIELDS: Final = len(Event._fields)


def cells_to_table(cells: Sequence[Any], first_handle: int) -> pa.Table:
    """Events laid end to end, field after field, as columns (EVENT_SCHEMA)."""
    count = len(cells) // NUM_FIELDS
    columns = {name: cells[place::NUM_FIELDS] for place, name in enumerate(Event._fields)}
    arrays = [
        pa.array(np.arange(first_handle, first_handle + count))
        if column.name == HANDLE
        else _array(columns[column.name], column.type)
        for column in EVENT_SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=EVENT_SCHEMA)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    # Most columns of most kinds are empty, and finding that out is far cheaper than converting them.
    if not values or (values[0] is None and _is_all_null(values, kind)):
        return pa.nulls(len(values), kind)
    return pa.array(values, kind)


def _is_all_null(values: Sequence[Any], kind: pa.DataType) -> bool:
    if pa.types.is_list(kind):
        # `count` compares by value, which numpy arrays refuse.
        return all(map(is_, values, repeat(None)))
    return values.count(None) == len(values)


def in_order(table: pa.Table) -> pa.Table:
    """Rows by (time_ns, instance, step), null first, then as they were."""
    times = table["time_ns"].to_numpy()
    steps = pc.fill_null(table["step"], _NO_STEP).to_numpy()
    instances = _ranks(table["instance"])
    if not _is_sorted(times, instances, steps):
        table = table.take(pa.array(np.lexsort((steps, instances, times))))
    return table


def _is_sorted(*keys: NDArray[np.int64]) -> bool:
    """Whether the keys, most significant first, never decrease."""
    undecided = np.ones(max(len(keys[0]) - 1, 0), np.bool_)
    for key in keys:
        before, after = key[:-1], key[1:]
        if (undecided & (after < before)).any():
            return False
        undecided &= after == before
    return True


def _ranks(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Each name's place among the names in the column; null comes first."""
    encoded = column.combine_chunks().dictionary_encode()
    names = encoded.dictionary.to_pylist()
    ranks = np.zeros(len(names) + 1, np.int64)
    for rank, place in enumerate(sorted(range(len(names)), key=names.__getitem__)):
        ranks[place] = rank
    ranks[-1] = -1
    places: NDArray[np.int32] = pc.fill_null(encoded.indices, len(names)).to_numpy()
    return ranks[places]


def detail_levels(kinds: pa.ChunkedArray) -> NDArray[np.int64]:
    """The detail level at which each row is written."""
    encoded = kinds.combine_chunks().dictionary_encode()
    levels = np.array([KINDS[kind].detail for kind in encoded.dictionary.to_pylist()], np.int64)
    return levels[encoded.indices.to_numpy()] if len(levels) else np.zeros(0, np.int64)


def numbered(table: pa.Table, first_seq: int, cause_seqs: pa.Array) -> pa.Table:
    """The rows with their numbers, as MEMORY_SCHEMA wants them."""
    seqs = pa.array(np.arange(first_seq, first_seq + len(table), dtype=np.uint64))
    table = table.append_column("seq", seqs).append_column("cause_seq", cause_seqs)
    return table.select(MEMORY_SCHEMA.names).cast(MEMORY_SCHEMA)
