"""`kvreplay faults`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvreplay.cli.common import JsonOption, make_console, print_json

if TYPE_CHECKING:
    from kvreplay.sim.catalogue import FaultRow, Setting


def faults(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="One fault, or a part: mooncake, offload, ... Default: all.")
    ] = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Print the faults that --inject and plan files know, with what must survive each."""
    from kvreplay.faults.catalogue import catalogue, find_rows
    from kvreplay.report.faults import print_catalogue, print_fault

    rows = list(catalogue().values()) if name is None else find_rows(name)
    if as_json:
        print_json(faults_document(rows))
    elif [row.name for row in rows] == [name]:
        print_fault(rows[0], make_console())
    else:
        print_catalogue(rows, make_console())


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
