"""How vectors came out: one line each, differences side by side, and a line for each oracle."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.finding import VectorFinding
from kvreplay.conformance.suite import Outcome, Result, Tally, tallies
from kvreplay.ids import plural
from kvreplay.report.layout import Column, Line, Rows, print_part

MAX_SHOWN: Final = 6
"""Fields of the step that differs; the others are counted."""

_STYLES: Final = {Result.EQUAL: "green", Result.DIFFERS: "bold red", Result.SKIPPED: "yellow"}
_INDENT: Final = 2


def print_outcome(console: Console, outcome: Outcome) -> None:
    """`differs  FILE  step 12`, and under it what differs there."""
    rest = ""
    if outcome.reason is not None:
        rest = outcome.reason
    elif outcome.differences and outcome.differences[0].step is not None:
        rest = f"step {outcome.differences[0].step}"
    line = f"{outcome.result:<7}  {outcome.path}" + (f"  {rest}" if rest else "")
    print_part(console, Line(line, style=_STYLES[outcome.result]))
    if outcome.differences:
        _print_differences(console, outcome.differences)
    for finding in outcome.findings[:MAX_SHOWN]:
        print_part(console, Line(_finding_line(finding), style="red", indent=_INDENT))
    if len(outcome.findings) > MAX_SHOWN:
        print_part(console, Line(f"... and {len(outcome.findings) - MAX_SHOWN} more", "dim", _INDENT))


def _finding_line(finding: VectorFinding) -> str:
    """`CONTENT  step 6, d, block 7, group 0: read wrong contents from position 16 on`."""
    places = [f"step {finding.step}", finding.request_id]
    places += [
        f"{name} {value}"
        for name, value in (("block", finding.block_id), ("group", finding.group))
        if value is not None
    ]
    return f"{finding.checker}  {', '.join(place for place in places if place)}: {finding.detail}"


def _print_differences(console: Console, differences: Sequence[Difference]) -> None:
    rows = [(each.field, _shown(each.expected), _shown(each.got)) for each in differences[:MAX_SHOWN]]
    columns = [Column(name, fold=True) for name in ("field", "expected", "got")]
    print_part(console, Rows(columns, rows, indent=2 * _INDENT))
    if len(differences) > MAX_SHOWN:
        rest = len(differences) - MAX_SHOWN
        print_part(console, Line(f"... and {rest} more fields of this step", "dim", _INDENT))


def _shown(value: Any) -> str:  # noqa: ANN401 - JSON
    """`-` for what is not there. With blanks, at which long lists can be cut into lines."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value, default=str)


def print_skipped(console: Console, outcomes: Iterable[Outcome], reason: str) -> None:
    """Those that were skipped for this reason, by kind: `skipped  139 scheduler vectors  nothing in it ...`."""
    kinds = Counter(outcome.kind for outcome in outcomes if outcome.reason == reason)
    for kind, count in sorted(kinds.items(), key=lambda item: str(item[0])):
        line = f"{Result.SKIPPED}  {plural(count, f'{kind} vector')}  {reason}"
        print_part(console, Line(line, style=_STYLES[Result.SKIPPED]))


def print_tallies(console: Console, outcomes: Iterable[Outcome]) -> None:
    for tally in tallies(outcomes):
        style = "bold red" if tally.differ else "bold green" if tally.equal else "bold"
        print_part(console, Line(tally_line(tally), style=style))


def tally_line(tally: Tally) -> str:
    return (
        f"{tally.oracle}: {tally.equal} of {tally.total} vectors equal, {tally.differ} differ, {tally.skipped} skipped"
    )


def conformance_document(outcomes: Sequence[Outcome], exit_status: int) -> dict[str, Any]:
    return {
        "exit_status": exit_status,
        "oracles": [
            {
                "oracle": tally.oracle,
                "vectors": tally.total,
                "equal": tally.equal,
                "differ": tally.differ,
                "skipped": tally.skipped,
            }
            for tally in tallies(outcomes)
        ],
        "vectors": [_outcome_document(outcome) for outcome in outcomes],
    }


def _outcome_document(outcome: Outcome) -> dict[str, Any]:
    return {
        "file": str(outcome.path),
        "kind": outcome.kind,
        "oracle": outcome.oracle or None,
        "result": str(outcome.result),
        "reason": outcome.reason,
        "step": outcome.differences[0].step if outcome.differences else None,
        "differences": [
            {"field": each.field, "expected": each.expected, "got": each.got} for each in outcome.differences
        ],
        "findings": [finding._asdict() for finding in outcome.findings],
    }
