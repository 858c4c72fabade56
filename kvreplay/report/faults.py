"""The fault catalogue, for people."""

from collections.abc import Iterable, Iterator
from itertools import groupby

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvreplay.faults.registry import settings_of
from kvreplay.faults.spec import COMMON_KEYS, default_of, write_setting
from kvreplay.report.layout import Section, Trimmed, print_sections, title
from kvreplay.sim.catalogue import FaultRow, Setting

_NAME_WIDTH = 18
"""Longer names stand on a line of their own, so that the text beside them keeps its width."""


def print_catalogue(rows: Iterable[FaultRow], console: Console) -> None:
    """All rows under their sections, and the keys that every fault has."""
    sections: list[Section] = []
    for name, members in sections_of(rows):
        sections.append(iter([title(name)]))
        sections += [_row(row) for row in members]
    print_sections(console, [*sections, _keys()])


def print_fault(row: FaultRow, console: Console) -> None:
    print_sections(console, [_row(row)])


def sections_of(rows: Iterable[FaultRow]) -> Iterator[tuple[str, list[FaultRow]]]:
    """Short names, then the others by the part that they act on; the catalogue has brought them into that order."""

    def section_of(row: FaultRow) -> str:
        return "Short names" if row.short_name else row.name.partition(".")[0].capitalize()

    for name, members in groupby(rows, key=section_of):
        yield name, list(members)


def _row(row: FaultRow) -> Section:
    details = Table.grid(padding=(0, 1))
    details.add_column(width=_NAME_WIDTH)
    details.add_column(style="dim", no_wrap=True)
    details.add_column(overflow="fold")
    is_short = len(row.name) <= _NAME_WIDTH
    details.add_row(Text(row.name if is_short else "", style="bold cyan"), "models", Text(row.models))
    place = "" if row.target == row.verb else f" on {row.target}"
    details.add_row("", "acts", Text.assemble((row.verb, "bold"), place))
    for name, setting in settings_of(row).items():
        details.add_row("", "setting", _setting(name, setting))
    details.add_row("", "survives", Text(row.survives))
    yield Trimmed(details if is_short else Group(Text(row.name, style="bold cyan"), details))


def _setting(name: str, setting: Setting) -> RenderableType:
    default = write_setting(setting, default_of(setting))
    kind = kind_of(setting)
    return Text.assemble((f"{name}={default}", "green"), f"  {setting.doc}", (f"  ({kind})" if kind else "", "dim"))


def kind_of(setting: Setting) -> str:
    """What may be written for it, in a word; empty where the default says it."""
    return "|".join(setting.choices) or {"moment": "time or event"}.get(setting.unit, setting.unit)


def _keys() -> Section:
    yield title("Keys of every fault", "where they mean something")
    keys = Table.grid(padding=(0, 2))
    keys.add_column(no_wrap=True)
    keys.add_column(overflow="fold")
    for key, meaning in COMMON_KEYS.items():
        keys.add_row(Text(key, style="green"), Text(meaning.doc))
    yield Text("")
    yield Trimmed(keys)
