"""`kvreplay profiles`."""

from typing import TYPE_CHECKING, Any

from kvreplay.behaviour import DEFAULT_PROFILE, PROFILES, SWITCHES
from kvreplay.cli.common import JsonOption, make_console, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table


def profiles(*, as_json: JsonOption = False) -> None:
    """Print every known behaviour, what it models, and its value in each profile."""
    if as_json:
        print_json(profiles_document())
        return
    console = make_console()
    console.print(_profile_table())
    console.print()
    for name in SWITCHES:
        console.print(_described(name))


def profiles_document() -> dict[str, Any]:
    return {
        "default": DEFAULT_PROFILE,
        "profiles": {name: dict(behaviour.switches) for name, behaviour in PROFILES.items()},
        "switches": {
            name: {"models": switch.models, "values": dict(switch.values)} for name, switch in SWITCHES.items()
        },
    }


def _profile_table() -> "Table":
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="Value of each switch; bold where a profile differs")
    table.add_column("switch", no_wrap=True)
    for profile in PROFILES:
        table.add_column(profile, overflow="fold")
    default = PROFILES[DEFAULT_PROFILE]
    for name in SWITCHES:
        values = [behaviour[name] for behaviour in PROFILES.values()]
        table.add_row(name, *(Text(value, style="" if value == default[name] else "bold") for value in values))
    return table


def _described(name: str) -> "RenderableType":
    """A switch, where it is documented in public, and what each value does."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    switch = SWITCHES[name]
    values = Table.grid(padding=(0, 2))
    values.add_column(no_wrap=True)
    values.add_column()
    for value, meaning in switch.values.items():
        values.add_row(Text(value, style="bold"), Text(meaning))
    return Group(
        Text.assemble((name, "bold"), "  ", (switch.models, "dim")), Padding(values, (0, 0, 1, 4), expand=False)
    )
