"""`kvreplay profiles`."""

from typing import Any

from kvreplay.behaviour import DEFAULT_PROFILE, PROFILES, SWITCHES
from kvreplay.cli.common import JsonOption, make_console, print_json


def profiles(*, as_json: JsonOption = False) -> None:
    """Print every known behaviour, what it models, and its value in each profile."""
    if as_json:
        print_json(profiles_document())
    else:
        from kvreplay.report.profiles import print_profiles

        print_profiles(make_console())


def profiles_document() -> dict[str, Any]:
    return {
        "default": DEFAULT_PROFILE,
        "profiles": {name: dict(behaviour.switches) for name, behaviour in PROFILES.items()},
        "switches": {
            name: {"models": switch.models, "values": dict(switch.values)} for name, switch in SWITCHES.items()
        },
    }
