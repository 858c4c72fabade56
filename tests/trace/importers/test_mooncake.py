"""Importing Mooncake's traces."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.cli.app import run_app
from kvreplay.errors import TraceError
from kvreplay.trace.importers import mooncake
from kvreplay.trace.importers.mooncake import read_mooncake
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import read_workload

PUBLIC = Path(__file__).parents[4] / "shared" / "traces" / "conversation_trace.jsonl"


def line(**changes: object) -> str:
    fields: dict[str, object] = {"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1], **changes}
    return json.dumps({name: value for name, value in fields.items() if value is not None})


def written(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{text}\n" for text in lines))
    return path


def test_each_line_is_a_request(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", line(), "", line(timestamp=7, input_length=512, hash_ids=[9], extra=1))
    first, second = read_mooncake(path).arrivals
    assert (first.request_id, first.time_ns, first.prompt_tokens, first.output_tokens) == ("r00000", 0, 600, 5)
    assert (second.request_id, second.time_ns, second.prompt_tokens) == ("r00001", 7_000_000, 512)
    assert (len(first.prefix_hashes), first.prefix_hash_tokens) == (2, 512)


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=2, max_size=5))
def test_hashes_are_equal_exactly_when_all_ids_up_to_there_are(id_lists: list[list[int]]) -> None:
    hashes, offsets = mooncake._chained([np.array(ids, np.uint64) for ids in id_lists])
    prefix_of: dict[int, tuple[int, ...]] = {}
    hash_of: dict[tuple[int, ...], int] = {}
    for ids, begin in zip(id_lists, offsets, strict=False):
        for place in range(len(ids)):
            found, prefix = int(hashes[begin + place]), tuple(ids[: place + 1])
            assert prefix_of.setdefault(found, prefix) == prefix
            assert hash_of.setdefault(prefix, found) == found


def test_gzip_is_recognised_by_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(gzip.compress(f"{line()}\n".encode(), mtime=0))
    assert len(read_mooncake(path).arrivals) == 1


def test_a_limit_reads_no_further(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", line(), line(), "{")
    assert len(read_mooncake(path, limit=2).arrivals) == 2


BAD_LINES = {
    "missing field": (line(hash_ids=None), "line 2: Object missing required field `hash_ids`"),
    "negative length": (line(input_length=-1), r"line 2: Expected `int` >= 1 - at `\$.input_length`"),
    "no output": (line(output_length=0), r"line 2: Expected `int` >= 1 - at `\$.output_length`"),
    "impossible length": (line(input_length=10**12), r"line 2: Expected `int` <= 16777216 - at `\$.input_length`"),
    "wrong type": (line(input_length="600"), r"line 2: Expected `int`, got `str` - at `\$.input_length`"),
    "bool": (line(output_length=True), r"line 2: Expected `int`, got `bool` - at `\$.output_length`"),
    "negative id": (line(hash_ids=[1, -1]), r"line 2: Expected `int` >= 0 - at `\$.hash_ids\[1\]`"),
    "too few ids": (line(hash_ids=[0]), "line 2: 1 hash_ids, expected 2 for an input_length of 600"),
    "out of order": (line(timestamp=3), "line 3: timestamp 1 after 3, expected rising timestamps"),
    "fractions": (line(timestamp=0.5), r"line 2: Expected `int`, got `float` .*--unit s if they are seconds"),
    "Unix time": (line(timestamp=1_700_000_000_000), "line 2: Expected `int` <= .*timestamps are milliseconds"),
    "no object": ("[]", "line 2: Expected `object`, got `array`"),
    "no JSON": ("timestamp,input_length", "line 2: JSON is malformed: invalid character"),
    "cut": ('{"timestamp": 1', "line 2: Input data was truncated"),
    "deep": ("[" * 100_000, "line 2: "),
}


@pytest.mark.parametrize(("text", "message"), BAD_LINES.values(), ids=BAD_LINES)
def test_a_bad_line_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = written(tmp_path / "m.jsonl", line(), text, line(timestamp=1))
    with pytest.raises(TraceError, match=f"^{path}: {message}") as caught:
        read_mooncake(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "empty file, expected JSON lines$"),
        (b"PAR1....", "a Parquet file, expected JSON lines of the Mooncake project; a trace needs no import "),
        (gzip.compress(line().encode() * 50, mtime=0)[:-30], "line 1: gzip stream damaged: "),
        (b"\x1f\x8b\x08\x00" + b"\xff" * 20, "line 1: gzip stream damaged: "),
        (b'{"timestamp": "\xff"}', "line 1: "),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(data)
    with pytest.raises(TraceError, match=f"^{path}: {message}"):
        read_mooncake(path)


def test_an_endless_line_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake, "_MAX_LINE_BYTES", 100)
    path = written(tmp_path / "m.jsonl", " " * 200)
    with pytest.raises(TraceError, match=r": line 1: longer than 100 bytes$"):
        read_mooncake(path)


def test_whole_seconds_are_noticed_by_their_rate(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", *(line(timestamp=second) for second in range(200)))
    with pytest.raises(TraceError, match=r"200 requests within 0.199 s: its timestamps seem to be seconds"):
        read_mooncake(path)
    assert read_mooncake(path, unit="s").arrivals[-1].time_ns == 199_000_000_000
    assert read_mooncake(path, unit="ms").arrivals[-1].time_ns == 199_000_000


def test_what_looks_like_milliseconds_is_not_taken_for_seconds(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", *(line(timestamp=150 * place) for place in range(20)))
    with pytest.raises(
        TraceError, match=r"20 requests within 2850 s, one in 142 s: its timestamps seem to be millisec"
    ):
        read_mooncake(path, unit="s")
    assert read_mooncake(path).arrivals[-1].time_ns == 2_850_000_000


def test_a_batch_that_arrives_at_once_is_no_mistake(tmp_path: Path) -> None:
    path = written(tmp_path / "m.jsonl", *[line()] * 200)
    assert len(read_mooncake(path).arrivals) == 200


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_writes_a_trace_and_says_so_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, target = written(tmp_path / "m.jsonl", line(), line()), tmp_path / "out.parquet"
    assert run_app(["import", "mooncake", str(source), "-o", str(target), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["output"] == str(target)
    assert document["workload"]["requests"] == 2
    assert document["fingerprint"] == read_trace(target).fingerprint()
    assert document["workload"]["shared_prompt_tokens"] == 600
    assert str(tmp_path) not in json.dumps(dict(read_trace(target).metadata.source))


def test_the_default_output_lies_in_the_current_folder_and_replaces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "data").mkdir()
    source = written(tmp_path / "data" / "m.v1.jsonl", line())
    monkeypatch.chdir(tmp_path)
    assert run_app(["import", "mooncake", str(source)]) == 0
    assert read_trace(tmp_path / "m.v1.parquet").num_rows == 1
    assert run_app(["import", "mooncake", str(source)]) == 2
    assert capsys.readouterr().err == "error: m.v1.parquet: exists already; name it with -o to replace it\n"


@pytest.mark.parametrize("output", ["m.jsonl", "missing/out.parquet", "."])
def test_an_impossible_output_leaves_everything_as_it_was(
    tmp_path: Path, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = written(tmp_path / "m.jsonl", line())
    before = source.read_text()
    assert run_app(["import", "mooncake", str(source), "-o", str(tmp_path / output)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert source.read_text() == before
    assert list(tmp_path.iterdir()) == [source]


@pytest.mark.skipif(not PUBLIC.exists(), reason="the public trace is not here")
def test_the_public_hour_of_conversations(tmp_path: Path) -> None:
    path = tmp_path / "conv.parquet"
    assert run_app(["import", "mooncake", str(PUBLIC), "-o", str(path)]) == 0
    arrivals = read_workload(read_trace(path)).arrivals
    assert len(arrivals) == 12_031
    assert sum(arrival.prompt_tokens for arrival in arrivals) == 144_793_823
    assert len({arrival.time_ns for arrival in arrivals}) == 1_180
    assert len({arrival.request_id for arrival in arrivals}) == 12_031
