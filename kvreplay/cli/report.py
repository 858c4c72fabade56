"""`kvreplay report`."""

import shlex
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from kvreplay.cli.common import JsonOption, make_console, trace_name
from kvreplay.errors import TraceError

if TYPE_CHECKING:
    from kvreplay.verdict.model import Summary


def report(
    trace: Annotated[str, typer.Argument(help="Trace that a run wrote (run ... -o TRACE).", metavar="TRACE")],
    *,
    as_json: JsonOption = False,
    width: Annotated[
        int | None,
        typer.Option("--width", metavar="N", min=40, help="Columns to print. Default: as wide as the terminal."),
    ] = None,
) -> None:
    """Print the report of a run again, from its trace, and exit with the status that the run had."""
    summary = read_summary(trace)
    if as_json:
        from kvreplay.report.json_report import write_json

        write_json(summary, sys.stdout)
    else:
        from kvreplay.report.terminal import print_report

        console = make_console()
        if width is not None:
            console.width = width
        print_report(summary, console)
    raise typer.Exit(summary.exit_status)


def read_summary(trace: str) -> "Summary":
    """The summary that a run left in its trace. Raises TraceError if there is none, or none that can be read."""
    from kvreplay.replay.presets import find_trace
    from kvreplay.trace.reader import read_trace
    from kvreplay.verdict.model import summary_from_json

    stored = read_trace(find_trace(trace_name(trace))).rows(["run.summary"], ["cause"])["cause"].drop_null().to_pylist()
    if not stored:
        played = f"kvreplay run {shlex.quote(trace)} -o OUT.parquet"
        raise TraceError(f"{trace}: a workload, not the result of a run: no run.summary; play it first: {played}")
    try:
        return summary_from_json(stored[-1])
    except TraceError as error:
        raise TraceError(f"{trace}: {error}") from error
