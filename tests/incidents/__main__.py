"""Run the tests that replay public incidents, and print which incidents those are: see `catalogue`."""

import sys
from collections import defaultdict
from itertools import groupby
from typing import Final

import pytest
from rich.console import Console
from rich.table import Table

from tests.incidents.catalogue import TESTS, Incident, marked_ids, read_catalogue


class _Tally:
    """A pytest plugin: the outcomes of each incident's tests."""

    def __init__(self, wanted: set[str]) -> None:
        self._wanted: Final = wanted
        self.passed: Final[dict[str, int]] = defaultdict(int)
        self.failed: Final[dict[str, list[str]]] = defaultdict(list)
        self._ids: Final[dict[str, list[str]]] = {}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        for item in items:
            ids = [name for mark in item.iter_markers("incident") for name in mark.args if name in self._wanted]
            if ids:
                self._ids[item.nodeid] = ids
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self._ids])
        items[:] = [item for item in items if item.nodeid in self._ids]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        for incident in self._ids[report.nodeid]:
            if report.failed:
                self.failed[incident].append(report.nodeid)
            elif report.when == "call" and report.passed:
                self.passed[incident] += 1


def _outcome(incident: Incident, tally: _Tally) -> str:
    if failed := tally.failed[incident.id]:
        return f"FAILED: {failed[0]}"
    if incident.missing:
        return f"no: {incident.missing}"
    num = tally.passed[incident.id]
    return f"yes: {num} test{'s' * (num > 1)}" if num else "no test ran"


def print_coverage(incidents: list[Incident], tally: _Tally) -> None:
    console = Console(soft_wrap=False, highlight=False)
    for kind, group in groupby(incidents, key=lambda incident: incident.kind):
        table = Table(title=kind, title_justify="left", box=None, expand=True)
        table.add_column("", width=3)
        table.add_column("public record", width=24)
        table.add_column("what went wrong", ratio=1)
        table.add_column("replayed", ratio=1)
        for incident in group:
            table.add_row(incident.id, " ".join(incident.refs), incident.title, _outcome(incident, tally))
        console.print(table)
        console.print()
    replayed = [one for one in incidents if tally.passed[one.id] and not tally.failed[one.id]]
    missing = [one for one in incidents if one.missing]
    console.print(f"{len(replayed)} of {len(incidents)} public incidents are replayed, {len(missing)} are not.")


def main(kinds: list[str]) -> int:
    incidents = [one for one in read_catalogue() if not kinds or one.id[0] in kinds]
    tally = _Tally({incident.id for incident in incidents})
    files = sorted({str(path) for incident, path in marked_ids() if incident in {one.id for one in incidents}})
    status = pytest.main([*files, "-q", "--no-header", f"--rootdir={TESTS.parent}", "-p", "no:cacheprovider"], [tally])
    print_coverage(incidents, tally)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
