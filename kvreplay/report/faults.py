"""The fault catalogue, for people."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console
from rich.text import Text

from kvreplay.faults.catalogue import part_of
from kvreplay.faults.registry import settings_of
from kvreplay.faults.spec import COMMON_KEYS, default_of, keys_of, write_setting
from kvreplay.report.layout import Column, Line, Rows, Section, print_sections, title
from kvreplay.sim.catalogue import FaultRow, Setting

_NAME_WIDTH = 18
"""Longer names stand on a line of their own, so that the text beside them keeps its width."""
_NAME_STYLE = "bold cyan"


def print_catalogue(rows: Iterable[FaultRow], console: Console) -> None:
    """All rows under their sections, and the keys that every fault has."""
    sections: list[Section] = []
    for name, members in sections_of(rows):
        sections.append(iter([title(name)]))
        sections += [_row(row) for row in members]
    print_sections(console, [*sections, _keys()])


def print_fault(row: FaultRow, console: Console) -> None:
    """One row, with what else a user of it must know: the connector that it needs, and the keys that it takes."""
    print_sections(console, [_row(row, is_alone=True)])


def sections_of(rows: Iterable[FaultRow]) -> Iterator[tuple[str, list[FaultRow]]]:
    """Short names, then the others by the part that they act on; the catalogue has brought them into that order."""

    def section_of(row: FaultRow) -> str:
        return part_of(row).capitalize() or "Short names"

    for name, members in groupby(rows, key=section_of):
        yield name, list(members)


def _row(row: FaultRow, *, is_alone: bool = False) -> Section:
    is_short = len(row.name) <= _NAME_WIDTH
    if not is_short:
        yield Line(row.name, style=_NAME_STYLE)
    target = "" if row.target == row.verb else f" on {row.target}"
    details: list[tuple[str, Text]] = [
        ("models", Text(row.models)),
        ("acts", Text.assemble((row.verb, "bold"), target)),
        *(("setting", _setting(name, setting)) for name, setting in settings_of(row).items()),
        ("survives", Text(row.survives)),
    ]
    if is_alone:
        details.append(("needs", Text(f"the {row.needs} connector" if row.needs else "nothing: any configuration")))
        keys = {key: COMMON_KEYS[key].doc for key in COMMON_KEYS if key in keys_of(row)}
        details += [("key", Text.assemble((key, "green"), f": {doc}")) for key, doc in keys.items()]
    rows = [
        (Text(f"{row.name if is_short and not place else '':{_NAME_WIDTH}}", _NAME_STYLE), Text(what, "dim"), said)
        for place, (what, said) in enumerate(details)
    ]
    yield Rows([Column(""), Column(""), Column("", fold=True)], rows, indent=0, gap=1)


def _setting(name: str, setting: Setting) -> Text:
    default = write_setting(setting, default_of(setting))
    kind = kind_of(setting)
    return Text.assemble((f"{name}={default}", "green"), f": {setting.doc}", (f" ({kind})" if kind else "", "dim"))


def kind_of(setting: Setting) -> str:
    """What may be written for it, in a word; empty where the default says it."""
    return "|".join(setting.choices) or {"moment": "time or event"}.get(setting.unit, setting.unit)


def _keys() -> Section:
    yield title("Keys of every fault", "where they mean something")
    rows = [(Text(key, style="green"), meaning.doc) for key, meaning in COMMON_KEYS.items()]
    yield Line("")
    yield Rows([Column(""), Column("", fold=True)], rows, indent=0)
