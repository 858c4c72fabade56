"""What a row of the fault catalogue says. The rows are data beside each connector; `faults` reads and runs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvreplay.sim.envelope import Delivery, Envelope

Transform = Callable[[Envelope, Mapping[str, Any], int], list[Delivery] | None]
"""(envelope, settings, draw) → what is delivered instead; None: leave it alone. `draw` is 64 random bits that
belong to this firing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a fault: its default (which also fixes its type), unit and meaning."""

    default: Any
    doc: str
    unit: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One fault: name, what it models, how it acts and on what, its settings, and what must survive it.

    `verb` is a message verb (drop, delay, duplicate, reorder, replace, corrupt, partial) with `target` a message
    kind; an action verb (abort, crash, ...) with `target` a kind of control address (`client`, `instance`); or
    `config` / `arrival` for set-up faults. `whole_conversation`: once chosen, every later message of that kind in
    the same conversation is hit too.
    """

    name: str
    models: str
    verb: str
    target: str
    survives: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    transform: Transform | None = None
    whole_conversation: bool = False
    short_name: bool = False
    needs: str = ""
    """A connector kind that must be configured for the fault to be possible, for instance `mooncake`."""
