"""Where a run's events go: a table in memory, and a Parquet file if one is wanted."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, BinaryIO, Final, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvreplay.errors import TraceError
from kvreplay.events import DETAIL_BLOCKS, DETAIL_RUN, DETAIL_STEPS, Event
from kvreplay.sim.event_loop import FOREVER_NS
from kvreplay.trace.columns import (
    CAUSE_HANDLE,
    HANDLE,
    NUM_FIELDS,
    cells_to_table,
    detail_levels,
    in_order,
    numbered,
)
from kvreplay.trace.fingerprint import Fingerprint
from kvreplay.trace.schema import MEMORY_SCHEMA, SCHEMA, STRINGS, TraceMetadata, release_memory
from kvreplay.user_files import reason

if TYPE_CHECKING:
    import polars as pl

_CELLS: Final = NUM_FIELDS << 12
"""Events are turned into columns while they are still in the processor's cache."""
_FLUSH_ROWS: Final = 1 << 16
_ROW_GROUP_ROWS: Final = 1 << 17


class TraceData(Protocol):
    """A trace's rows, wherever they are. Reports are computed from nothing else."""

    @property
    def metadata(self) -> TraceMetadata: ...

    def frame(self, columns: Sequence[str] | None = None) -> "pl.DataFrame":
        """The rows that every detail level has, in order, strings as strings; all columns or those named."""
        ...

    def fingerprint(self) -> str:
        """16 hex digits over those rows but the summary; the same at every detail level."""
        ...


class MemoryTrace:
    """Collects events, and keeps those that every detail level has. An `EventSink`.

    Finer events are accepted too, so that a writer can be put in its place; here they are only numbered, but that those
    of blocks are kept beside the others, for laws that only they show broken.
    """

    def __init__(self, metadata: TraceMetadata, detail: int = DETAIL_RUN) -> None:
        self.metadata = metadata
        self.detail = detail
        self._cells: list[Any] = []
        """The last events, field after field: extending one list is faster than keeping objects."""
        self._num_events = 0
        self._pending: list[pa.Table] = []
        self._num_pending = 0
        self._flush_at = _FLUSH_ROWS
        self._settled_ns = -FOREVER_NS
        """Nothing earlier may still come."""
        self._num_rows = 0
        self._run_rows: list[pa.Table] = []
        self._block_rows: list[pa.Table] = []
        """At detail level blocks: rows of that level and of level run."""
        self._run_handles: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        self._fingerprint = Fingerprint()

    # -- taking events ----------------------------------------------------------------------------------------

    def emit(self, event: Event) -> int:
        handle = self._num_events
        self._num_events = handle + 1
        cells = self._cells
        cells.extend(event)
        if len(cells) >= _CELLS:
            self._transpose()
        return handle

    def _transpose(self) -> None:
        count = len(self._cells) // NUM_FIELDS
        self._pending.append(cells_to_table(self._cells, self._num_events - count))
        self._num_pending += count
        self._cells.clear()

    def advance(self, watermark_ns: int) -> None:
        """Promise that no later event is earlier than `watermark_ns`. Cheap; call it often."""
        if self._num_pending >= self._flush_at:
            if self._cells:
                self._transpose()  # they may be earlier than what is pending: instances report their past late
            self._flush(watermark_ns)
            # Rows that stay are sorted again only once as many have come: no work in vain far ahead.
            self._flush_at = max(_FLUSH_ROWS, 2 * self._num_pending)

    def settle(self) -> None:
        """Order all events so far; later ones must not be earlier than the last of them."""
        if self._cells:
            self._transpose()
        if self._num_pending:
            self._flush(FOREVER_NS)
        release_memory()

    def _flush(self, until_ns: int) -> None:
        """Number the rows before `until_ns`."""
        table = in_order(pa.concat_tables(self._pending))
        times = table["time_ns"].to_numpy()
        assert times[0] >= self._settled_ns, f"an event of {times[0]} ns comes after {self._settled_ns} ns"
        num_ready = int(np.searchsorted(times, until_ns))
        self._num_pending = len(table) - num_ready
        self._pending = [table.slice(num_ready)] if self._num_pending else []
        if num_ready:
            self._settled_ns = int(times[num_ready - 1])
            self._number(table.slice(0, num_ready))

    def _number(self, table: pa.Table) -> None:
        """Give rows their final numbers: from here on they are in order for good."""
        levels = detail_levels(table["kind"])
        if levels.max(initial=DETAIL_RUN) > self.detail:
            is_kept = levels <= self.detail
            table, levels = table.filter(pa.array(is_kept)), levels[is_kept]
        is_run = levels == DETAIL_RUN
        self._remember(table[HANDLE].to_numpy()[is_run], np.flatnonzero(is_run) + self._num_rows)
        rows = numbered(table, self._num_rows, self._cause_seqs(table[CAUSE_HANDLE]))
        run_rows = rows.filter(pa.array(is_run))
        self._fingerprint.update(run_rows)
        self._run_rows.append(run_rows.cast(SCHEMA))
        if self.detail >= DETAIL_BLOCKS:
            self._block_rows.append(rows.filter(pa.array(levels != DETAIL_STEPS)).cast(SCHEMA))
        self._num_rows += len(rows)
        self._store(rows)

    def _remember(self, handles: NDArray[np.int64], seqs: NDArray[np.int64]) -> None:
        """Note the rows that a later event may name as its cause, sorted by handle."""
        if len(handles):
            order = np.argsort(handles, kind="stable")
            self._run_handles.append((handles[order], seqs[order]))

    def _cause_seqs(self, causes: pa.ChunkedArray) -> pa.Array:
        """Row numbers of the causes; -1, the handle of nothing, is no cause."""
        handles = pc.fill_null(causes, -1).to_numpy()
        seqs = np.zeros(len(handles), np.uint64)
        is_open = handles >= 0
        is_null = ~is_open
        for known_handles, known_seqs in reversed(self._run_handles):
            if not is_open.any():
                break
            places = np.searchsorted(known_handles, handles)
            places[places == len(known_handles)] = 0
            is_found = is_open & (known_handles[places] == handles)
            seqs[is_found] = known_seqs[places[is_found]]
            is_open &= ~is_found
        assert not is_open.any(), f"event {handles[is_open][0]}, named as a cause, is not of detail level run"
        return pa.array(seqs, mask=is_null)

    def _store(self, rows: pa.Table) -> None:
        """Rows have their final place (MEMORY_SCHEMA)."""

    # -- giving them back -------------------------------------------------------------------------------------

    def frame(self, columns: Sequence[str] | None = None) -> "pl.DataFrame":
        self.settle()
        return frame_of(self._run_rows, columns)

    def block_frame(self, columns: Sequence[str]) -> "pl.DataFrame":
        """The same with the rows of detail level blocks between; empty at any other level."""
        self.settle()
        return frame_of(self._block_rows, columns)

    def fingerprint(self) -> str:
        self.settle()
        return self._fingerprint.hexdigest()


class TraceWriter(MemoryTrace):
    """A trace that also goes to a Parquet file, behind the watermark.

    A context manager. The file appears at the end of the block and not before: until then a temporary file beside it
    grows, of which nothing stays if the block is left by an exception, Ctrl-C included.
    """

    def __init__(self, path: Path, metadata: TraceMetadata, detail: int = DETAIL_RUN) -> None:
        super().__init__(metadata, detail)
        self.path = path
        # A link stays a link: what it points at is replaced.
        self._target = Path(os.path.realpath(path))
        self._temporary = self._target.with_name(f".{self._target.name}.{os.getpid()}.tmp")
        self._rows: list[pa.Table] = []
        self._num_waiting = 0
        self._file: BinaryIO | None = None
        self._parquet: pq.ParquetWriter | None = None

    def _open(self) -> None:
        with self._disk():
            self._file = self._temporary.open("wb")
            self._parquet = pq.ParquetWriter(
                self._file,
                SCHEMA.with_metadata(self.metadata.encode()),
                compression="zstd",
                use_dictionary=[*STRINGS, "prefix_hashes.list.element"],
                write_page_checksum=True,
            )

    @contextmanager
    def _disk(self) -> Iterator[None]:
        """Turn what the disk refuses into a message, and leave nothing behind."""
        try:
            yield
        except OSError as error:
            self.abort()
            raise TraceError(f"{self.path}: cannot be written: {reason(error)}") from error

    def _store(self, rows: pa.Table) -> None:
        self._rows.append(rows)
        self._num_waiting += len(rows)
        if self._num_waiting >= _ROW_GROUP_ROWS:
            self._write_groups(at_least=_ROW_GROUP_ROWS)

    def _write_groups(self, *, at_least: int) -> None:
        """Write row groups of one size, so that the bytes do not depend on how the rows came in."""
        table = pa.concat_tables(self._rows)
        start = 0
        while len(table) - start >= at_least:
            group = table.slice(start, _ROW_GROUP_ROWS).combine_chunks().cast(SCHEMA)
            with self._disk():
                assert self._parquet is not None, "closed or aborted before"
                self._parquet.write_table(group, row_group_size=_ROW_GROUP_ROWS)
            start += len(group)
        self._rows = [table.slice(start)]
        self._num_waiting = len(table) - start

    def close(self) -> None:
        """Write what is left and put the file in its place."""
        self.settle()
        if self._num_waiting:
            self._write_groups(at_least=1)
        with self._disk():
            assert self._parquet is not None, "closed or aborted before"
            assert self._file is not None
            self._parquet.close()
            self._file.close()
            self._temporary.replace(self._target)
        self._parquet = self._file = None

    def abort(self) -> None:
        """Forget the file; what was at its path before is untouched."""
        if self._parquet is not None:
            # Closing writes a footer, which a full disk refuses; it must not be tried again on deletion.
            with suppress(OSError):
                self._parquet.close()
            self._parquet.is_open = False
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
        self._parquet = self._file = None
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        # Not before: from here on whatever ends the block is sure to be seen, Ctrl-C on the way in included.
        try:
            self._open()
        except BaseException:
            self.abort()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.abort()  # nothing is left to do if it has been closed


def frame_of(tables: Sequence[pa.Table], columns: Sequence[str] | None) -> "pl.DataFrame":
    """Rows in SCHEMA as one polars frame, strings as strings."""
    import polars as pl

    schema = MEMORY_SCHEMA if columns is None else pa.schema([MEMORY_SCHEMA.field(name) for name in columns])
    parts = [table.select(schema.names).cast(schema) for table in tables]
    frame = pl.from_arrow(pa.concat_tables(parts) if parts else schema.empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame


def check_output(path: Path, inputs: Sequence[Path] = ()) -> None:
    """Refuse an output path that cannot work, before any work is done. Raises TraceError."""
    if str(path) == "-":
        raise TraceError("-o -: a trace goes into a file, not to standard output")
    folder = path.parent
    if not folder.is_dir():
        raise TraceError(f"{path}: no such folder: {folder}")
    if path.is_dir():
        raise TraceError(f"{path}: is a folder, expected a file name")
    if path.exists():
        if not path.is_file():
            raise TraceError(f"{path}: is not a regular file")
        for source in inputs:
            if source.exists() and path.samefile(source):
                raise TraceError(f"{path}: is the input itself; write to another file")
    if not os.access(folder, os.W_OK):
        raise TraceError(f"{path}: folder {folder} is not writable")
