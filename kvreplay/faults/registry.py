"""The verbs by name, found by looking into the package `verbs`."""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules
from typing import Final

from kvreplay.faults import verbs
from kvreplay.faults.verb import Verb
from kvreplay.sim.catalogue import FaultRow, Setting


def _discover() -> dict[str, Verb]:
    found: dict[str, Verb] = {}
    for module in iter_modules(verbs.__path__, f"{verbs.__name__}."):
        verb: Verb = import_module(module.name).VERB
        assert verb.name not in found, f"two verbs are called {verb.name}"
        found[verb.name] = verb
    return found


VERBS: Final[Mapping[str, Verb]] = _discover()


def settings_of(row: FaultRow) -> dict[str, Setting]:
    """A row's settings: its verb's, and its own on top."""
    return {**VERBS[row.verb].settings, **row.settings}
