"""`kvreplay info`: what it counts, and how it shows it."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvreplay.cli.app import run_app
from kvreplay.events import Event
from kvreplay.trace.describe import describe, shared_prompt_tokens
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.workload import Arrival
from kvreplay.trace.writer import TraceWriter


def arrival(name: str, prompt_tokens: int, hashes: list[int], **params: object) -> Arrival:
    return Arrival(name, 0, prompt_tokens, 4, np.array(hashes, np.uint64), 10, params=params)


def test_shared_tokens_are_those_an_endless_cache_would_hold() -> None:
    arrivals = [
        arrival("a", 25, [1, 2, 3]),
        arrival("same", 25, [1, 2, 3]),
        arrival("same start", 30, [1, 2, 9]),
        arrival("same hash, longer chunk", 30, [1, 2, 3]),
        arrival("other tenant", 25, [1, 2, 3], namespace="b"),
    ]
    assert shared_prompt_tokens(arrivals) == 0 + 25 + 20 + 25 + 0


def test_a_later_turn_shares_the_earlier_turns_output() -> None:
    arrivals = [
        arrival("a", 25, [1, 2, 3], session="s", turn=0),
        arrival("b", 35, [1, 2, 4, 5], session="s", turn=1),
    ]
    assert shared_prompt_tokens(arrivals) == 29


@pytest.fixture
def run_trace(tmp_path: Path) -> Path:
    """The output of a small run, with names that mean something to a terminal."""
    metadata = TraceMetadata(
        source={"tool": "kvreplay run", "inputs": ["0123"]},
        config={"model": {"block_size": 16}, "topology": {"instances": 2}},
        seed=3,
        faults=["timeout:p=0.02"],
        profile="ideal",
    )
    path = tmp_path / "run.parquet"
    with TraceWriter(path, metadata) as writer:
        writer.emit(arrival("a", 25, [1, 2, 3], session="s", turn=0).event())
        writer.emit(Event("request.finished", 2_000_000_000, "[bold]d0\x1b", 1, "a"))
        writer.emit(Event("request.finished", 2_000_000_000, "p0", 1, "a"))
        writer.emit(Event("run.summary", 2_000_000_000, status="passed"))
    return path


def test_the_document_tells_what_was_run_and_what_came_of_it(run_trace: Path) -> None:
    document = describe(read_trace(run_trace))
    assert document["span_s"] == 2.0
    assert document["workload"]["requests"] == 1
    assert document["workload"]["sessions"] == 1
    assert document["workload"]["prompt_tokens"] == {"total": 25, "p50": 25, "p90": 25, "p99": 25, "max": 25}
    assert [instance["finished"] for instance in document["instances"]] == [1, 1]
    assert (document["seed"], document["profile"], document["verdict"]) == (3, "ideal", "passed")
    assert document["events"] == {"request.arrived": 1, "run.summary": 1, "request.finished": 2}


@pytest.mark.parametrize("width", [80, 120])
def test_the_tables_fit_the_terminal_and_show_names_as_they_are(
    run_trace: Path, width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.chdir(run_trace.parent)
    assert run_app(["info", run_trace.name]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= width
    for text in ("kvreplay run, input 0123", "timeout:p=0.02", "[model] block_size=16", "[bold]d0\\x1b", "passed"):
        assert text in shown
    assert "\x1b" not in shown


def test_json_is_one_object_and_nothing_else(run_trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["info", str(run_trace), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == describe(read_trace(run_trace))


def test_a_trace_that_cannot_be_replayed_is_described_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, TraceMetadata(source={})) as writer:
        writer.emit(Event("lookup", 5, "d0"))
    assert run_app(["info", str(path)]) == 0
    assert "note: cannot be replayed: no request arrives in it" in capsys.readouterr().out


def test_a_jsonl_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text("{}")
    assert run_app(["info", str(path)]) == 2
    assert capsys.readouterr().err == (
        f"error: {path}: JSON lines, expected a Parquet trace; import it first: "
        f"kvreplay import mooncake {path} -o c.parquet\n"
    )
