"""`kvreplay report`: the same report again, from the trace alone."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from kvreplay.cli.app import run_app
from kvreplay.events import Event
from kvreplay.report.terminal import print_report
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.writer import TraceWriter
from kvreplay.verdict.model import Summary


def write_trace(path: Path, stored: str | None) -> Path:
    with TraceWriter(path, TraceMetadata(source={"tool": "test"})) as trace:
        trace.emit(Event("request.arrived", 0, request_id="r1", prompt_tokens=4, output_tokens=1))
        if stored is not None:
            trace.emit(Event("run.summary", 5, status="stalled", cause=stored))
    return path


def test_it_reprints_what_the_run_printed_and_exits_alike(
    summary: Summary, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    trace = write_trace(tmp_path / "out.parquet", summary.to_json())
    out = io.StringIO()
    print_report(summary, Console(file=out, width=100))
    assert run_app(["report", str(trace)]) == 4
    assert capsys.readouterr().out == out.getvalue()


def test_its_width_can_be_given(summary: Summary, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write_trace(tmp_path / "out.parquet", summary.to_json())
    run_app(["report", str(trace), "--width", "120"])
    plot = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  prefill  blocks")]
    assert [len(line) for line in plot] == [120]


def test_its_json_is_the_run_s_without_the_wall_clock(
    summary: Summary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "out.parquet", summary.to_json())
    assert run_app(["report", str(trace), "--json"]) == 4
    assert json.loads(capsys.readouterr().out) == json.loads(summary.to_json())


def test_a_canned_trace_is_no_result(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["report", "decode-stall"]) == 2
    assert capsys.readouterr().err == (
        "error: decode-stall: a workload, not the result of a run: no run.summary; play it first: kvreplay run "
        "decode-stall -o OUT.parquet\n"
    )


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (None, "a workload, not the result of a run: no run.summary; play it first: kvreplay run "),
        ("{}", "run.summary: not a summary that this version can read: "),
    ],
)
def test_a_trace_that_no_run_wrote_is_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], stored: str | None, message: str
) -> None:
    trace = write_trace(tmp_path / "workload.parquet", stored)
    assert run_app(["report", str(trace)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {trace}: {message}")
    assert captured.err.count("\n") == 1
