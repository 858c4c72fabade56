"""`kvreplay info`: what it counts, and how it shows it."""

import json
from pathlib import Path

import numpy as np
import pytest

from kvreplay.cli.app import run_app
from kvreplay.events import DETAIL_BLOCKS, Event
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


def test_percentiles_are_those_of_a_run_s_report(tmp_path: Path) -> None:
    """Index round(q (n - 1)) of four: round(1.5) = 2."""
    path = tmp_path / "t.parquet"
    with TraceWriter(path, TraceMetadata(source={})) as writer:
        for place in range(4):
            writer.emit(arrival(f"r{place}", 10 * (place + 1), list(range(10 * place, 11 * place + 1))).event())
    tokens = describe(read_trace(path))["workload"]["prompt_tokens"]
    assert tokens == {"total": 100, "p50": 30, "p90": 40, "p99": 40, "max": 40}


def test_an_instance_has_as_many_events_as_the_file_has_rows_of_it(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    with TraceWriter(path, TraceMetadata(source={}), DETAIL_BLOCKS) as writer:
        writer.emit(arrival("a", 25, [1, 2, 3]).event())
        for kind in ("step", "block.allocated", "block.freed", "request.finished"):
            writer.emit(Event(kind, 2_000_000_000, "d0", 1, "a"))
    document = describe(read_trace(path))
    assert document["instances"] == [{"id": "d0", "events": 4, "finished": 1, "crashes": 0}]
    assert sum(document["events"].values()) == 5


def test_what_a_workload_was_made_with_can_be_given_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    out = str(tmp_path / "out.parquet")
    given = ["--prompt", "lognormal:median=100,sigma=0.6,max=500", "--turns", "3", "--output", "7"]
    assert run_app(["synth", "-o", out, "--requests", "9", *given]) == 0
    assert run_app(["info", out]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("prompt=lognormal:median=100,sigma=0.6,max=500", "turns=fixed:3", "output=fixed:7"):
        assert text in shown


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
    printed = json.loads(capsys.readouterr().out)
    # Its config is a stub, with which nothing can be replayed.
    assert [note.partition(":")[0] for note in printed.pop("notes")] == ["needs --config to be replayed"]
    assert printed == {name: value for name, value in describe(read_trace(run_trace)).items() if name != "notes"}


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
