"""What a verb is. Each module of `verbs` holds one, as `VERB`; a new file is a new verb."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kvreplay.sim.catalogue import FaultRow, Setting, Settings
from kvreplay.sim.envelope import Command, Delivery, Envelope

MESSAGE_KEYS: Final = (
    "p", "nth", "count", "after", "until", "request", "instance", "peer", "rank", "group", "id",
)  # fmt: skip
REQUEST_ACTION_KEYS: Final = ("p", "nth", "count", "after", "until", "request", "instance", "id")
INSTANCE_ACTION_KEYS: Final = ("p", "nth", "count", "after", "until", "instance", "id")
ARRIVAL_KEYS: Final = ("p", "nth", "count", "after", "until", "request", "instance", "id")
CONFIG_KEYS: Final = ("instance", "id")

Deliveries = Callable[[FaultRow, Envelope, Settings, int], list[Delivery]]
"""(row, envelope, settings, draw) → deliveries, none if it is lost. Pure: no clock, no state, no engine.
`settings["until"]` is the event pattern that what is held back waits for, or an empty string."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageVerb:
    """Maps one message to its deliveries."""

    name: str
    doc: str
    deliveries: Deliveries
    settings: Mapping[str, Setting] = field(default_factory=dict)
    holds: bool = False
    """Whether its late delivery can wait for an event (`until=EVENT`) instead of a time."""
    needs_transform: bool = False
    keys: tuple[str, ...] = MESSAGE_KEYS


@dataclass(frozen=True, slots=True)
class Order:
    """A command, so long after the moment that triggered the action, or after the order before it."""

    command: Command
    delay_ns: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionVerb:
    """Commands a control address. `request_id` is that of the triggering event, None if the verb acts on an
    instance; `moment` names the setting that says when, or maps the settings to an event pattern.
    """

    name: str
    doc: str
    orders: Callable[[Settings, str | None], tuple[Order, ...]]
    moment: str | Callable[[Settings], str] = "at"
    settings: Mapping[str, Setting] = field(default_factory=dict)
    acts_on_requests: bool = False
    keys: tuple[str, ...] = INSTANCE_ACTION_KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupVerb:
    """Changes what the run starts from: the configuration, or a request on its arrival."""

    name: str
    doc: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    keys: tuple[str, ...] = CONFIG_KEYS


Verb = MessageVerb | ActionVerb | SetupVerb
