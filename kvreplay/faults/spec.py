"""One fault as a user writes it: `NAME[:key=value,...]`, or a table of a plan file.

A comma separates keys, a backslash takes the meaning from the character after it. `Fault.spec` is the canonical
text: parsed again, it gives the same fault.
"""

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from kvreplay.behaviour import nearest
from kvreplay.errors import ConfigError
from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.patterns import EventPattern, Moment, format_moment, parse_event_pattern, parse_moment
from kvreplay.faults.registry import VERBS, settings_of
from kvreplay.faults.values import (
    Ordinals,
    format_duration,
    format_float,
    format_ordinals,
    parse_duration,
    parse_integer,
    parse_ordinals,
    parse_probability,
    parse_share,
)
from kvreplay.faults.verb import MessageVerb
from kvreplay.sim.catalogue import DURATION, EVENT, MOMENT, SHARE, FaultRow, Setting
from kvreplay.sim.envelope import WRITE_DATA

MAX_SPEC_LENGTH: Final = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A row of the catalogue with its keys and settings: what fires, on which conversations or requests.

    Keys that were not given are None (`id`: empty); `settings` is complete. `origin` is where a user finds it.
    """

    row: FaultRow
    settings: Mapping[str, Any]
    spec: str
    origin: str
    p: float | None = None
    nth: Ordinals | None = None
    count: int | None = None
    after: Moment | None = None
    until: Moment | None = None
    request: str | None = None
    instance: str | None = None
    peer: str | None = None
    rank: int | None = None
    group: int | None = None
    id: str = ""

    @property
    def name(self) -> str:
        return self.row.name

    @property
    def identity(self) -> Hashable:
        """What it does to whom, however it is spelled."""
        return (self.name, tuple(self.settings.items()), *(getattr(self, key) for key in COMMON_KEYS))

    @property
    def hits_everything(self) -> bool:
        """Without a choice, every conversation or request that the keys match."""
        return self.p is None and self.nth is None and self.count is None


class Key(NamedTuple):
    """A common key: how its value is read and written, and what it means."""

    parse: Callable[[str], Any]
    write: Callable[[Any], str]
    doc: str


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


COMMON_KEYS: Final[Mapping[str, Key]] = {
    "p": Key(parse_probability, format_float, "probability of each conversation (action fault: request)"),
    "nth": Key(parse_ordinals, format_ordinals, "only these of the matching ones, counted from 1: 3, 2..4 or 1,3"),
    "count": Key(lambda text: parse_integer(text, 1), str, "at most so many"),
    "after": Key(parse_moment, format_moment, "not before this time (90s) or event (request.parked@D0)"),
    "until": Key(
        parse_moment,
        format_moment,
        "not from this time or event on; where a message is late: it waits for this event "
        "(pull.settled#self: of a request that the message names)",
    ),
    "request": Key(_text, str, "glob over request ids"),
    "instance": Key(
        _text,
        str,
        "glob over instances: the one that asks or receives; where an action acts: without it, one on a whole instance "
        "acts on the first prefill instance alone (or the first of all)",
    ),
    "peer": Key(_text, str, "glob over the instances at the other end"),
    "rank": Key(parse_integer, str, "worker rank at the instance's end"),
    "group": Key(parse_integer, str, "KV cache group of the bytes"),
    "id": Key(_text, str, "tells two faults of one name apart: each id draws its own luck"),
}


def parse_spec(text: str) -> Fault:
    """The fault that `--inject TEXT` means. Raises ConfigError in one line that names it."""
    origin = f"--inject {text if len(text) <= 120 else text[:117] + '...'}"
    if len(text) > MAX_SPEC_LENGTH:
        raise ConfigError(f"{origin}: longer than {MAX_SPEC_LENGTH} characters")
    if not text.isprintable():
        raise ConfigError(f"--inject {text!r:.120}: has an unprintable character")
    name, colon, rest = text.partition(":")
    pairs = [_split_pair(part, origin) for part in _split_parts(rest)] if colon else []
    return build_fault(name, pairs, origin)


def build_fault(name: str, pairs: Iterable[tuple[str, str]], origin: str) -> Fault:
    """The fault with this name and these keys, all still text."""
    row = catalogue().get(name)
    if row is None:
        hint = nearest(name, list(catalogue()), "; kvreplay faults lists them")
        raise ConfigError(f"{origin}: no fault {name!r}{hint}")
    settings = settings_of(row)
    known = [key for key in COMMON_KEYS if key in keys_of(row)] + list(settings)
    given: dict[str, Any] = {}
    for key, value in pairs:
        if key in given:
            raise ConfigError(f"{origin}: {key} is given twice")
        if key not in known:
            hint = nearest(key, known, f"; it has {', '.join(known)}")
            raise ConfigError(f"{origin}: {name} has no key {key!r}{hint}")
        given[key] = _parse_value(settings.get(key), key, value, origin)
    return _fault(row, {key: given[key] for key in known if key in given}, origin)


def keys_of(row: FaultRow) -> tuple[str, ...]:
    """The common keys that mean something for this row; a setting of the same name takes a key's place."""
    without = set(row.settings) | (set() if row.target == WRITE_DATA else {"group"})
    return tuple(key for key in VERBS[row.verb].keys if key not in without)


def _fault(row: FaultRow, given: Mapping[str, Any], origin: str) -> Fault:
    settings = settings_of(row)
    values = {name: given.get(name, default_of(setting)) for name, setting in settings.items()}
    common = {key: value for key, value in given.items() if key not in settings}
    verb = VERBS[row.verb]
    waits = isinstance(common.get("until"), EventPattern) and isinstance(verb, MessageVerb) and verb.holds
    if waits and "delay" not in given:
        values["delay"] = 0  # the event alone decides
    return Fault(row=row, settings=values, spec=_canonical(row, given), origin=origin, **common)


def _canonical(row: FaultRow, given: Mapping[str, Any]) -> str:
    settings = settings_of(row)
    parts = [f"{key}={_written(settings.get(key), key, value)}" for key, value in given.items()]
    return f"{row.name}:{','.join(parts)}" if parts else row.name


# -- values ----------------------------------------------------------------------------------------------


def _parse_value(setting: Setting | None, key: str, text: str, origin: str) -> Any:  # noqa: ANN401
    try:
        return COMMON_KEYS[key].parse(text) if setting is None else _parse_setting(setting, text)
    except ValueError as error:
        raise ConfigError(f"{origin}: {key} {error}") from None


def _parse_setting(setting: Setting, text: str) -> Any:  # noqa: ANN401 - a default fixes each one's type
    if setting.choices:
        if text not in setting.choices:
            raise ValueError(
                f"is one of {', '.join(setting.choices)}, not {text!r}{nearest(text, list(setting.choices))}"
            )
        return text
    if setting.default is None and text == setting.none:
        return None
    if setting.unit == DURATION:
        return parse_duration(text)
    if setting.unit == MOMENT:
        return parse_moment(text)
    if setting.unit == EVENT:
        return parse_event_pattern(text)
    if setting.unit == SHARE:
        return parse_share(text)
    return parse_integer(text, setting.minimum) if isinstance(setting.default, int) else _text(text)


def default_of(setting: Setting) -> Any:  # noqa: ANN401
    """The default as a value: an event pattern is written as text in a row."""
    if setting.unit in (EVENT, MOMENT) and isinstance(setting.default, str):
        return parse_event_pattern(setting.default)
    return setting.default


def _written(setting: Setting | None, key: str, value: Any) -> str:  # noqa: ANN401
    text = COMMON_KEYS[key].write(value) if setting is None else write_setting(setting, value)
    return text if key == "nth" else _escape(text)


def write_setting(setting: Setting, value: Any) -> str:  # noqa: ANN401
    """A setting's value as a user writes it."""
    if value is None:
        return setting.none
    if isinstance(value, EventPattern):
        return value.text
    if setting.unit in (DURATION, MOMENT) and isinstance(value, int):
        return format_duration(value)
    return format_float(value) if isinstance(value, float) else str(value)


# -- text ------------------------------------------------------------------------------------------------


def _split_parts(text: str) -> list[str]:
    """At the commas without a backslash; `nth=1,3` stays together."""
    parts, escaped = [""], False
    for character in text:
        if escaped or character != ",":
            parts[-1] += character
            escaped = character == "\\" and not escaped
        else:
            parts.append("")
    return _join_lists(parts)


def _join_lists(parts: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for part in parts:
        if joined and joined[-1].startswith("nth=") and part[:1].isdigit() and "=" not in part:
            joined[-1] += f",{part}"
        else:
            joined.append(part)
    return joined


def _split_pair(part: str, origin: str) -> tuple[str, str]:
    key, equals, value = part.partition("=")
    if not equals or not key:
        raise ConfigError(f"{origin}: expected key=value, got {part!r}")
    return key.strip(), _unescape(value)


def _unescape(text: str) -> str:
    characters = iter(text)
    return "".join(next(characters, "\\") if character == "\\" else character for character in characters)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace(",", "\\,")
