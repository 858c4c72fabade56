"""read_trace: every bad file is one line that names it, the place, and what was expected."""

import json
from collections.abc import Callable
from pathlib import Path
from random import Random

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvreplay.errors import TraceError
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import Workload, read_workload

Damage = Callable[[Path], object]


def rewritten(path: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    """The file as another tool would write it after `change`."""
    pq.write_table(change(pq.read_table(path)), path)
    return path


def replaced(name: str, values: pa.Array) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.set_column(table.schema.get_field_index(name), name, values)


def with_metadata(**values: object) -> Callable[[pa.Table], pa.Table]:
    def change(table: pa.Table) -> pa.Table:
        changed = {key.encode(): json.dumps(value).encode() for key, value in values.items()}
        return table.replace_schema_metadata({**(table.schema.metadata or {}), **changed})

    return change


def write_bytes(text: bytes) -> Damage:
    return lambda path: path.write_bytes(text)


def change_bytes(change: Callable[[bytes], bytes]) -> Damage:
    return lambda path: path.write_bytes(change(path.read_bytes()))


def change_table(change: Callable[[pa.Table], pa.Table]) -> Damage:
    return lambda path: rewritten(path, change)


def flip_in_first_page(data: bytes) -> bytes:
    place = data.index(b"(\xb5/\xfd") + 12  # within the first zstd frame
    return data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :]


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


BAD_FILES: dict[str, tuple[Damage, str]] = {
    "missing": (lambda path: path.unlink(), "cannot be read: no such file or directory"),
    "folder": (replace_by_folder, "cannot be read: is a directory"),
    "empty": (write_bytes(b""), "empty file, expected a Parquet trace"),
    "JSON lines": (write_bytes(b'{"timestamp": 0}\n'), "JSON lines, expected a Parquet trace; import it first: "),
    "text": (write_bytes(b"hello, world"), "byte 0: not a Parquet file: starts with b'hell', expected b'PAR1'"),
    "gzip": (write_bytes(b"\x1f\x8b\x08\x00....."), "byte 0: a gzip file, expected a Parquet trace"),
    "truncated": (
        change_bytes(lambda data: data[:-5]),
        r"byte \d+: truncated: ends with b'.*', expected b'PAR1'",
    ),
    "magic only": (write_bytes(b"PAR1PAR1"), r"byte 4: truncated: ends with b'PAR1', expected b'PAR1'"),
    "footer gone": (change_bytes(lambda data: data[:20] + data[-8:]), "footer: damaged: "),
    "page damaged": (change_bytes(flip_in_first_page), "row group 0: damaged: .*CRC"),
    "foreign": (
        change_table(lambda table: table.replace_schema_metadata(None)),
        "a Parquet file, but no kvreplay trace: no 'schema_version' in its metadata",
    ),
    "future": (change_table(with_metadata(schema_version=2)), "trace schema version 2, expected 1"),
    "metadata no JSON": (
        change_table(lambda table: table.replace_schema_metadata({**table.schema.metadata, b"seed": b"{"})),
        "metadata 'seed': expected JSON, got b'{'",
    ),
    "metadata changed": (
        change_table(with_metadata(seed=8)),
        r"metadata 'checksum': damaged: \d+ does not fit source, .*, profile, expected \d+$",
    ),
    "metadata of wrong type": (
        change_table(with_metadata(config=[1])),
        "metadata 'config': expected dict, got list",
    ),
    "no params": (
        change_table(lambda table: table.drop_columns(["params"])),
        "column 'params': missing, expected string",
    ),
    "text for time": (
        change_table(replaced("time_ns", pa.array(["a"] * 5))),
        "column 'time_ns': is string, expected int64",
    ),
    "float for time": (
        change_table(replaced("time_ns", pa.array([0.5] * 5))),
        "column 'time_ns': is double, expected int64",
    ),
    "number too large": (
        change_table(replaced("rank", pa.array([1 << 20] * 5))),
        "row group 0: column 'rank': damaged: Integer value 1048576 not in range",
    ),
    "null kind": (
        change_table(replaced("kind", pa.array(["lookup", None, "lookup", "lookup", None]))),
        "row 1: column 'kind': null, expected a value",
    ),
    "time goes back": (
        change_table(replaced("time_ns", pa.array([0, 5, 4, 9, 9]))),
        r"row 2: time_ns 4 after 5, expected rows in order of \(time_ns, seq\)",
    ),
    "negative time": (change_table(replaced("time_ns", pa.array([-1, 5, 5, 9, 9]))), "row 0: time_ns -1 after 0, "),
    "seq repeats": (change_table(replaced("seq", pa.array([0, 1, 1, 3, 4]))), "row 2: seq 1 after 1, "),
}


@pytest.mark.parametrize(("damage", "text"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_bad_file_is_one_line(small_trace: Path, damage: Damage, text: str) -> None:
    damage(small_trace)
    with pytest.raises(TraceError, match=f"^{small_trace}: {text}") as caught:
        read_trace(small_trace).frame()
    assert "\n" not in str(caught.value)


def test_a_jsonl_is_told_how_to_become_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "conv.jsonl.gz"
    path.write_bytes(b"\x1f\x8b")
    with pytest.raises(TraceError, match=f"kvreplay import mooncake {path} -o conv.parquet$"):
        read_trace(path)


def comparable(workload: Workload) -> list[tuple[object, ...]]:
    return [
        (one.request_id, one.time_ns, one.prompt_tokens, one.output_tokens, one.prefix_hashes.tolist(), one.params)
        for one in workload.arrivals
    ]


def test_any_flipped_byte_is_noticed_or_harmless(small_trace: Path, small_workload: Workload) -> None:
    data, rng = small_trace.read_bytes(), Random(0)
    num_noticed = 0
    for _ in range(300):
        place = rng.randrange(len(data))
        small_trace.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
        try:
            trace = read_trace(small_trace)
            found = comparable(read_workload(trace))
        except TraceError:
            num_noticed += 1
        else:
            assert found == comparable(small_workload)
            assert (trace.metadata.seed, trace.metadata.source) == (7, {"tool": "test"})
    assert num_noticed > 100


@pytest.mark.parametrize("name", ["priority", "output_hash", "cause", "params", "prefix_hashes"])
def test_a_damaged_page_is_noticed_also_in_a_column_that_nobody_reads(small_trace: Path, name: str) -> None:
    data, group = small_trace.read_bytes(), pq.ParquetFile(small_trace).metadata.row_group(0)
    chunks = [group.column(place) for place in range(group.num_columns)]
    [chunk] = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] == name]
    first_page = chunk.data_page_offset if chunk.dictionary_page_offset is None else chunk.dictionary_page_offset
    place = first_page + chunk.total_compressed_size - 1
    small_trace.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(TraceError, match=f"^{small_trace}: row group 0: damaged: .*CRC"):
        read_trace(small_trace)


@pytest.mark.parametrize("version", [1, "1.7"])
def test_files_of_the_same_major_version_are_taken_with_what_they_have_more(
    small_trace: Path, version: int | str
) -> None:
    def change(table: pa.Table) -> pa.Table:
        table = table.append_column("future", pa.array(range(5)))
        table = replaced("kind", pa.array(["request.arrived"] * 3 + ["quantum.leap", "quantum.leap"]))(table)
        return with_metadata(schema_version=version, mood="good")(table)

    trace = read_trace(rewritten(small_trace, change))
    assert trace.warnings == [f"{small_trace}: rows of unknown kind are skipped: quantum.leap"]
    assert trace.metadata.extra == {"mood": "good"}
    assert trace.metadata.seed == 7
    assert trace.scan().collect()["future"].to_list() == list(range(5))
    assert trace.frame()["request_id"].to_list() == ["a", "b", "c"]


def test_a_trace_rewritten_by_polars_reads_the_same(small_trace: Path) -> None:
    """Other writers' string and list types mean the same."""
    before = read_trace(small_trace)
    frame = before.scan().collect()
    metadata = {key.decode(): value.decode() for key, value in before.metadata.encode().items()}
    frame.write_parquet(small_trace, metadata=metadata)
    after = read_trace(small_trace)
    assert after.frame().equals(before.frame())
    assert after.fingerprint() == before.fingerprint()


def test_a_frame_has_the_columns_asked_for_with_strings_as_strings(small_trace: Path) -> None:
    frame = read_trace(small_trace).frame(["kind", "time_ns"])
    assert frame.schema == {"kind": pl.String, "time_ns": pl.Int64}
    assert frame.rows()[-1] == ("request.aborted", 9)
