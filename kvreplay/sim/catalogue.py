"""What a row of the fault catalogue says. Rows are data beside each connector; `faults` runs them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from kvreplay.events import Event
from kvreplay.sim.envelope import Delivery, Envelope

Settings = Mapping[str, Any]
"""A fault's settings by name, under `request` and `group` the common keys of that name (None: any), and under
`requests` all requests of the conversation (`FaultRow.opened_by`) or, where that is not known, of the message."""

Transform = Callable[[Envelope, Settings, int], list[Delivery]]
"""(envelope, settings, draw) → what is delivered instead. `draw` is 64 random bits that belong to this
conversation: the same for all of its messages."""

Victims = Callable[[Envelope, Settings, int], tuple[str, ...]]
"""(envelope, settings, draw) → the requests that the fault harms here; none: it leaves the message alone."""

Selects = Callable[[Envelope, Settings], bool]
"""(envelope, settings) → whether this message is one that the fault can act on."""

Rewrite = Callable[[Mapping[str, Any], Settings], dict[str, Any]]
"""(a request's `kv_transfer_params`, settings) → those that arrive."""


class Death(NamedTuple):
    """What an instance dies of: an exception's type and text, so long after it began to start."""

    exception: str
    message: str
    after_ns: int = 0


DiesOf = Callable[[Settings, str], Death]
"""(settings, instance) → what it dies of while it starts."""

Catches = Mapping[str, Callable[[Event], bool]]
"""Kind of event → whether it shows that its request shared the fate of a conversation that does not name it."""

DURATION: Final = "duration"
EVENT: Final = "event"
MOMENT: Final = "moment"
SHARE: Final = "share"


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One setting of a fault: its default (which also fixes its type), unit and meaning.

    Units with a meaning of their own: `duration`, whole nanoseconds, written `500ms`; `event`, an event pattern;
    `moment`, a duration since the run's start or an event pattern; `share`, a float in (0, 1]. A default of None
    is written as `none` says.
    """

    default: Any
    doc: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    minimum: int = 0
    none: str = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultRow:
    """One fault: name, what it models, how it acts and on what, its settings, and what must survive it.

    `verb` is a message verb (drop, delay, duplicate, reorder, replace, corrupt, partial) with `target` a
    message kind; an action verb (abort, crash, ...) with `target` a kind of control address (`client`,
    `instance`, or `producer`: that of the triggering event's request); or `config` / `arrival` / `startup` for set-up
    faults. `settings` come on top of the verb's own and may
    give those another default. `whole_conversation`: once chosen, every later message of that kind in the
    same conversation is hit too.
    """

    name: str
    models: str
    verb: str
    target: str
    survives: str
    settings: Mapping[str, Setting] = field(default_factory=dict)
    transform: Transform | None = None
    """What the verbs `replace` and `partial` deliver, and `duplicate` may."""
    victims: Victims | None = None
    """None: every request that the message names."""
    selects: Selects | None = None
    rewrite: Rewrite | None = None
    """What the set-up verb `arrival` does."""
    dies_of: DiesOf | None = None
    """What the set-up verb `startup` does."""
    opened_by: str = ""
    """Kind of the message that opens such a conversation and names all of its requests: it is remembered."""
    catches: Catches = field(default_factory=dict)
    """Once the fault has fired: later events, of the same instance and peer, whose requests it names too."""
    whole_conversation: bool = False
    lasts: bool = False
    """Its harm to the instance that it hits outlasts the message: whoever comes later suffers too."""
    short_name: bool = False
    needs: str = ""
    """A connector kind that must be configured for the fault to be possible, for instance `mooncake`."""
