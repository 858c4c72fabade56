"""`kvreplay faults`."""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreplay.cli.common import JsonOption, make_console, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType

    from kvreplay.sim.catalogue import FaultRow, Setting

_NAME_WIDTH = 18
"""Longer names stand on a line of their own, so that the text beside them keeps its width."""


def faults(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="One fault. Default: all of them.")] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the faults that --inject and plan files know, with what must survive each."""
    from kvreplay.faults.catalogue import catalogue, find_row

    rows = list(catalogue().values()) if name is None else [find_row(name)]
    if as_json:
        print_json(faults_document(rows))
        return
    console = make_console()
    for section, members in _sections(rows):
        if name is None:
            console.print(f"[bold]{section}[/]\n")
        for row in members:
            console.print(_described(row))
            console.print()
    if name is None:
        console.print("[bold]Keys of every fault, where they mean something[/]\n")
        console.print(_keys_table())


def faults_document(rows: Iterable["FaultRow"]) -> dict[str, Any]:
    from kvreplay.faults.registry import VERBS
    from kvreplay.faults.spec import COMMON_KEYS

    return {
        "faults": [_row_document(row) for row in rows],
        "keys": {key: meaning.doc for key, meaning in COMMON_KEYS.items()},
        "verbs": {verb.name: verb.doc for verb in VERBS.values()},
    }


def _row_document(row: "FaultRow") -> dict[str, Any]:
    from kvreplay.faults.registry import settings_of
    from kvreplay.faults.spec import keys_of

    return {
        "name": row.name,
        "short_name": row.short_name,
        "models": row.models,
        "verb": row.verb,
        "target": row.target,
        "settings": {name: _setting_document(setting) for name, setting in settings_of(row).items()},
        "keys": list(keys_of(row)),
        "survives": row.survives,
        "needs": row.needs or None,
    }


def _setting_document(setting: "Setting") -> dict[str, Any]:
    from kvreplay.faults.spec import default_of, write_setting

    return {
        "default": write_setting(setting, default_of(setting)),
        "unit": setting.unit or None,
        "choices": list(setting.choices),
        "meaning": setting.doc,
    }


def _sections(rows: Iterable["FaultRow"]) -> Iterator[tuple[str, list["FaultRow"]]]:
    """Short names, then the others by the part that they act on; `catalogue` has brought them into that order."""
    from itertools import groupby

    def section_of(row: "FaultRow") -> str:
        return "Short names" if row.short_name else row.name.partition(".")[0].capitalize()

    for section, members in groupby(rows, key=section_of):
        yield section, list(members)


def _described(row: "FaultRow") -> "RenderableType":
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from kvreplay.faults.registry import settings_of

    details = Table.grid(padding=(0, 1))
    details.add_column(width=_NAME_WIDTH)
    details.add_column(style="dim", no_wrap=True)
    details.add_column(overflow="fold")
    is_short = len(row.name) <= _NAME_WIDTH
    details.add_row(Text(row.name if is_short else "", style="bold cyan"), "models", Text(row.models))
    place = "" if row.target == row.verb else f" on {row.target}"
    details.add_row("", "acts", Text.assemble((row.verb, "bold"), place))
    for name, setting in settings_of(row).items():
        details.add_row("", "setting", _setting_text(name, setting))
    details.add_row("", "survives", Text(row.survives))
    return details if is_short else Group(Text(row.name, style="bold cyan"), details)


def _setting_text(name: str, setting: "Setting") -> "RenderableType":
    from rich.text import Text

    from kvreplay.faults.spec import default_of, write_setting

    kind = "|".join(setting.choices) or {"moment": "time or event"}.get(setting.unit, setting.unit)
    default = write_setting(setting, default_of(setting))
    return Text.assemble((f"{name}={default}", "green"), f"  {setting.doc}", (f"  ({kind})" if kind else "", "dim"))


def _keys_table() -> "RenderableType":
    from rich.table import Table
    from rich.text import Text

    from kvreplay.faults.spec import COMMON_KEYS

    keys = Table.grid(padding=(0, 2))
    keys.add_column(no_wrap=True)
    keys.add_column(overflow="fold")
    for key, meaning in COMMON_KEYS.items():
        keys.add_row(Text(key, style="green"), Text(meaning.doc))
    return keys
