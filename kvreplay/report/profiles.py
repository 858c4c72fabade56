"""Profiles and behaviours, for people."""

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvreplay.behaviour import DEFAULT_PROFILE, PROFILES, SWITCHES
from kvreplay.report.layout import Column, Section, Trimmed, print_sections, table, title

_INDENT = 4


def print_profiles(console: Console) -> None:
    print_sections(console, (_profiles(), *(_switch(name) for name in SWITCHES)))


def _profiles() -> Section:
    yield title("Profiles", "what differs from the default")
    rows = [(name, told_apart(name)) for name in PROFILES]
    yield table([Column(""), Column("", fold=True)], rows)


def told_apart(profile: str) -> str:
    """What makes the profile another one than the default."""
    if profile == DEFAULT_PROFILE:
        return "the default"
    default = PROFILES[DEFAULT_PROFILE]
    changes = {name: value for name, value in PROFILES[profile].switches.items() if value != default[name]}
    return ", ".join(f"{name}={value}" for name, value in changes.items())


def _switch(name: str) -> Section:
    """A switch, where it is documented in public, what each value does, and in which profiles."""
    switch = SWITCHES[name]
    yield Trimmed(Text.assemble((name, "bold"), "  ", (switch.models, "dim")))
    values = Table.grid(padding=(0, 2))
    values.add_column(no_wrap=True)
    values.add_column()
    for value, meaning in switch.values.items():
        values.add_row(Text(value, style="bold"), _meaning(name, value, meaning))
    yield Trimmed(Padding(values, (0, 0, 0, _INDENT), expand=False))


def _meaning(name: str, value: str, meaning: str) -> RenderableType:
    place = where(name, value)
    return Group(Text(meaning), Text(place, style="cyan")) if place else Text(meaning)


def where(name: str, value: str) -> str:
    """Which profiles have this value; only the default is named where it is the default's."""
    if PROFILES[DEFAULT_PROFILE][name] == value:
        return "the default"
    profiles = [profile for profile, behaviour in PROFILES.items() if behaviour[name] == value]
    return f"in {', '.join(profiles)}" if profiles else ""
