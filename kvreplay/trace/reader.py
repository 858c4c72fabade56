"""Reading a trace file. Whatever is wrong with it becomes one line that says where and what was expected."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kvreplay.errors import TraceError
from kvreplay.events import KINDS, SCHEMA_VERSION
from kvreplay.trace.fingerprint import RUN_KINDS, Fingerprint
from kvreplay.trace.schema import (
    CHECKSUM,
    MEMORY_SCHEMA,
    METADATA_KEYS,
    REQUIRED,
    STRINGS,
    TraceMetadata,
    metadata_checksum,
)
from kvreplay.trace.writer import frame_of
from kvreplay.user_files import reason

if TYPE_CHECKING:
    import polars as pl

MAGIC: Final = b"PAR1"
_GZIP_MAGIC: Final = b"\x1f\x8b"
_SMALLEST: Final = 12
"""Bytes of the smallest Parquet file: magic, footer length, magic."""
_ARROW_KEYS: Final = ("ARROW:schema", "pandas")


def read_trace(path: Path) -> "Trace":
    """Open a trace, and check what every reader relies on: format, version, columns, order of rows, and that all its
    pages are as they were written, also of columns that nobody will ask for.

    Raises TraceError. Whatever else a file of this major version holds is accepted.
    """
    _check_container(path)
    with _opened(path) as file:
        metadata = _metadata(path, file)
        _check_columns(path, file.schema_arrow)
        kind_counts = _check_rows(path, file)
    return Trace(path, metadata, kind_counts)


class Trace:
    """A trace file that has been checked; its rows are read when asked for. Implements `TraceData`."""

    def __init__(self, path: Path, metadata: TraceMetadata, kind_counts: dict[str, int]) -> None:
        self.path = path
        self.metadata = metadata
        self.kind_counts = kind_counts
        """Rows of each kind, in order of first appearance."""
        self.num_rows = sum(kind_counts.values())
        unknown = [kind for kind in kind_counts if kind not in KINDS]
        self.warnings = [f"{path}: rows of unknown kind are skipped: {', '.join(unknown)}"] if unknown else []

    def rows(self, kinds: Sequence[str], columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of these kinds, in order, as MEMORY_SCHEMA types them; all columns or those named."""
        names = MEMORY_SCHEMA.names if columns is None else list(columns)
        parts = list(self._parts(kinds, names)) if any(kind in self.kind_counts for kind in kinds) else []
        schema = pa.schema([MEMORY_SCHEMA.field(name) for name in names])
        return pa.concat_tables(parts) if parts else schema.empty_table()

    def frame(self, columns: Sequence[str] | None = None) -> "pl.DataFrame":
        return frame_of([self.rows(RUN_KINDS, columns)], columns)

    def fingerprint(self) -> str:
        fingerprint = Fingerprint()
        for part in self._parts(RUN_KINDS, MEMORY_SCHEMA.names):
            fingerprint.update(part)
        return fingerprint.hexdigest()

    def scan(self) -> "pl.LazyFrame":
        """All rows and columns of the file, unknown ones included, lazily."""
        import polars as pl

        frame = pl.scan_parquet(self.path)
        known = [name for name in STRINGS if name in frame.collect_schema()]
        return frame.with_columns(pl.col(known).cast(pl.String))

    def _parts(self, kinds: Sequence[str], names: list[str]) -> Iterator[pa.Table]:
        wanted = pa.array(kinds, pa.string())
        with _opened(self.path) as file:
            for group in range(file.num_row_groups):
                table = _read_group(self.path, file, group, list(dict.fromkeys([*names, "kind"])))
                yield table.filter(pc.is_in(table["kind"], wanted)).select(names)


# -- the container ----------------------------------------------------------------------------------------------


def _check_container(path: Path) -> None:
    """The bytes at both ends. Parquet libraries report a broken end in words nobody can act on."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
            file.seek(max(size - len(MAGIC), 0))
            tail = file.read(len(MAGIC))
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    if not size:
        raise TraceError(f"{path}: empty file, expected a Parquet trace")
    name = path.name.removesuffix(".gz")
    if name.endswith((".jsonl", ".json")) or head[:1] in (b"{", b"["):
        raise TraceError(
            f"{path}: JSON lines, expected a Parquet trace; import it first: "
            f"kvreplay import mooncake {path} -o {Path(name).with_suffix('.parquet')}"
        )
    if head[:2] == _GZIP_MAGIC:
        raise TraceError(f"{path}: byte 0: a gzip file, expected a Parquet trace")
    if head != MAGIC:
        raise TraceError(f"{path}: byte 0: not a Parquet file: starts with {head!r}, expected {MAGIC!r}")
    if size < _SMALLEST or tail != MAGIC:
        raise TraceError(f"{path}: byte {max(size - len(MAGIC), 0)}: truncated: ends with {tail!r}, expected {MAGIC!r}")


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile]:
    with _damage(path, "footer"):
        file = pq.ParquetFile(path, page_checksum_verification=True)
    with file:
        yield file


@contextmanager
def _damage(path: Path, where: str) -> Iterator[None]:
    """Errors of the Parquet library while reading this part of the file."""
    try:
        yield
    except (pa.ArrowException, OSError, ValueError, MemoryError, OverflowError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise TraceError(f"{path}: {where}: damaged: {text}") from error


# -- metadata and columns -----------------------------------------------------------------------------------------


def _metadata(path: Path, file: pq.ParquetFile) -> TraceMetadata:
    raw = {key.decode(errors="replace"): value for key, value in (file.metadata.metadata or {}).items()}
    if "schema_version" not in raw:
        raise TraceError(f"{path}: a Parquet file, but no kvreplay trace: no 'schema_version' in its metadata")
    values: dict[str, Any] = {}
    for key, text in raw.items():
        if key not in _ARROW_KEYS:
            values[key] = _json(path, key, text)
    version = values.pop("schema_version")
    if str(version).partition(".")[0] != str(SCHEMA_VERSION):
        raise TraceError(f"{path}: trace schema version {version}, expected {SCHEMA_VERSION}")
    known: dict[str, Any] = {key: values.pop(key) for key in METADATA_KEYS if key in values}
    _check_metadata(path, known)
    _check_checksum(path, file.metadata.metadata or {})
    values.pop(CHECKSUM, None)
    return TraceMetadata(
        **{"source": {}, **known},
        kvreplay_version=str(values.pop("kvreplay_version", "unknown")),
        schema_version=version,
        extra=values,
    )


def _json(path: Path, key: str, text: bytes) -> Any:  # noqa: ANN401 - JSON is whatever it is
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        if key in ("schema_version", *METADATA_KEYS):
            raise TraceError(f"{path}: metadata {key!r}: expected JSON, got {text[:40]!r}") from error
        return text.decode(errors="replace")


def _check_metadata(path: Path, values: dict[str, Any]) -> None:
    expected: dict[str, tuple[type, ...]] = {
        "source": (dict,),
        "config": (dict,),
        "seed": (int,),
        "faults": (list,),
        "profile": (str,),
        "t0_unix_ns": (int,),
    }
    for key, types in expected.items():
        value = values.get(key)
        if value is not None and (not isinstance(value, types) or isinstance(value, bool)):
            raise TraceError(f"{path}: metadata {key!r}: expected {types[0].__name__}, got {type(value).__name__}")
    if values.get("source") is None:
        values.pop("source", None)


def _check_checksum(path: Path, texts: Mapping[bytes, bytes]) -> None:
    """Files of other tools may lack it."""
    stored = texts.get(CHECKSUM.encode())
    if stored is not None and stored != metadata_checksum(texts):
        raise TraceError(
            f"{path}: metadata {CHECKSUM!r}: damaged: {stored.decode(errors='replace')[:40]} does not fit "
            f"{', '.join(METADATA_KEYS)}, expected {metadata_checksum(texts).decode()}"
        )


def _check_columns(path: Path, schema: pa.Schema) -> None:
    for column in MEMORY_SCHEMA:
        places = schema.get_all_field_indices(column.name)
        if len(places) > 1:
            raise TraceError(f"{path}: column {column.name!r}: there are {len(places)} of that name")
        if not places:
            raise TraceError(f"{path}: column {column.name!r}: missing, expected {column.type}")
        found = schema.field(places[0]).type
        if not _fits(found, column.type):
            raise TraceError(f"{path}: column {column.name!r}: is {found}, expected {column.type}")


def _fits(found: pa.DataType, expected: pa.DataType) -> bool:
    """Whether other writers' types mean the same: width and encoding may differ, kinds may not."""
    if pa.types.is_dictionary(found):
        found = found.value_type
    if pa.types.is_null(found):
        return True
    if pa.types.is_list(expected):
        is_list = pa.types.is_list(found) or pa.types.is_large_list(found)
        return is_list and _fits(found.value_type, expected.value_type)
    if pa.types.is_integer(expected):
        return bool(pa.types.is_integer(found))
    return any(check(found) for check in (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view))


# -- rows ---------------------------------------------------------------------------------------------------------


def _check_pages(path: Path, file: pq.ParquetFile, group: int) -> None:
    """Read every column that has a meaning once: with that its pages' checksums are verified."""
    with _damage(path, f"row group {group}"):
        file.read_row_group(group, columns=MEMORY_SCHEMA.names, use_threads=False)


def _read_group(path: Path, file: pq.ParquetFile, group: int, names: Sequence[str]) -> pa.Table:
    """These columns of one row group, typed by MEMORY_SCHEMA."""
    num_rows = file.metadata.row_group(group).num_rows
    with _damage(path, f"row group {group}"):
        table = file.read_row_group(group, columns=names)
        if len(table) != num_rows:
            raise ValueError(f"{len(table)} rows, expected {num_rows}")
    columns = []
    for name in names:
        with _damage(path, f"row group {group}: column {name!r}"):
            column = _conform(table[name], MEMORY_SCHEMA.field(name).type)
            column.validate(full=True)
        columns.append(column)
    return pa.Table.from_arrays(columns, names=names)


def _conform(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    return column if column.type == kind else column.cast(kind)


def _check_rows(path: Path, file: pq.ParquetFile) -> dict[str, int]:
    """Required values are there and rows are in order. Returns how many rows of each kind there are."""
    counts: Counter[str] = Counter()
    first_row = 0
    last: dict[str, int | None] = {"time_ns": 0, "seq": None}
    for group in range(file.num_row_groups):
        _check_pages(path, file, group)
        table = _read_group(path, file, group, REQUIRED)
        for name in REQUIRED:
            if table[name].null_count:
                row = first_row + int(np.flatnonzero(table[name].is_null().to_numpy())[0])
                raise TraceError(f"{path}: row {row}: column {name!r}: null, expected a value")
        for name in last:
            values = table[name].to_numpy()
            place = _first_break(values, last[name], strict=name == "seq")
            if place is not None:
                before = values[place - 1] if place else last[name]
                raise TraceError(
                    f"{path}: row {first_row + place}: {name} {values[place]} after {before}, "
                    "expected rows in order of (time_ns, seq)"
                )
            last[name] = int(values[-1]) if len(values) else last[name]
        for entry in pc.value_counts(table["kind"]).to_pylist():
            counts[entry["values"]] += entry["counts"]
        first_row += len(table)
    return dict(counts)


def _first_break(values: NDArray[np.integer[Any]], last: int | None, *, strict: bool) -> int | None:
    """The first place whose value does not follow the one before it; before the first comes `last`."""
    if last is not None and len(values) and int(values[0]) < last + strict:
        return 0
    is_bad = values[1:] <= values[:-1] if strict else values[1:] < values[:-1]
    places = np.flatnonzero(is_bad)
    return int(places[0]) + 1 if len(places) else None
