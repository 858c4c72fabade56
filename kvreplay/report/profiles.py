"""Profiles and behaviours, for people."""

from rich.console import Console
from rich.text import Text

from kvreplay.behaviour import DEFAULT_PROFILE, PROFILES, SWITCHES
from kvreplay.report.layout import Column, Line, Rows, Section, print_sections, table, title

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
    yield Line(Text.assemble((name, "bold"), "  ", (switch.models, "dim")))
    rows = []
    for value, meaning in switch.values.items():
        rows.append((Text(value, style="bold"), Text(meaning)))
        place = where(name, value)
        if place:
            rows.append((Text(""), Text(place, style="cyan")))
    yield Rows([Column(""), Column("", fold=True)], rows, indent=_INDENT)


def where(name: str, value: str) -> str:
    """Which profiles have this value; only the default is named where it is the default's."""
    if PROFILES[DEFAULT_PROFILE][name] == value:
        return "the default"
    profiles = [profile for profile, behaviour in PROFILES.items() if behaviour[name] == value]
    return f"in {', '.join(profiles)}" if profiles else ""
