"""The catalogue: the rows of every connector that a configuration can have, and the generic ones."""

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Final

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError
from kvreplay.faults import generic
from kvreplay.faults.registry import VERBS
from kvreplay.faults.verb import MessageVerb
from kvreplay.sim.catalogue import FaultRow

_CONNECTORS: Final = ("mooncake", "offloading", "simple_cpu")
"""Those whose faults a run can inject."""


@cache
def catalogue() -> Mapping[str, FaultRow]:
    """All rows by name: short names first, then by connector in the order in which each lists them."""
    rows = sorted(_all_rows(), key=lambda row: not row.short_name)
    by_name: dict[str, FaultRow] = {}
    for row in rows:
        assert row.name not in by_name, f"two faults are called {row.name}"
        verb = VERBS[row.verb]
        if isinstance(verb, MessageVerb) and verb.needs_transform:
            assert row.transform is not None, f"{row.name}: {row.verb} needs a transform"
        by_name[row.name] = row
    return by_name


def _all_rows() -> Iterator[FaultRow]:
    for name in _CONNECTORS:
        yield from import_module(f"kvreplay.connectors.{name}.catalogue").ROWS
    yield from generic.ROWS


def part_of(row: FaultRow) -> str:
    """The part of a cluster that it acts on, as its name says; of those with short names: none."""
    return "" if row.short_name else row.name.partition(".")[0]


def find_rows(name: str) -> list[FaultRow]:
    """The row of this name, or those of this part. Raises ConfigError naming the nearest known one."""
    rows = catalogue()
    if name in rows:
        return [rows[name]]
    of_part = [row for row in rows.values() if name and part_of(row) == name]
    if not of_part:
        parts = dict.fromkeys(part for row in rows.values() if (part := part_of(row)))
        raise ConfigError(f"no fault {name!r}{nearest(name, [*rows, *parts], '; kvreplay faults lists them')}")
    return of_part
