"""Globs over names, and patterns over events."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase, translate
from functools import lru_cache
from typing import Final

from kvreplay.behaviour import nearest
from kvreplay.events import KINDS, Event
from kvreplay.faults.values import format_duration, parse_duration

Matcher = Callable[[str], object]

SERVING: Final = "serving"
SELF: Final = "self"


@lru_cache(maxsize=256)
def matcher(glob: str) -> Matcher:
    """Truth for the names that a shell-style glob (`*`, `?`, `[...]`) matches, by case."""
    if not re.search(r"[*?\[]", glob):
        return glob.__eq__
    return re.compile(translate(glob)).match


def matches_any(glob: str | None, names: Iterable[str]) -> bool:
    return glob is None or any(map(matcher(glob), names))


@dataclass(frozen=True, slots=True)
class EventPattern:
    """`KIND[@INSTANCE][#REQUEST]`, each part a glob, for instance `request.first_token@D0#r*`.

    `@serving` is the instance that serves the client (the consumer of a pair); `#self` any request that the
    waiting message names.
    """

    text: str
    kinds: frozenset[str]
    instance: str | None = None
    request: str | None = None

    @property
    def needs_routes(self) -> bool:
        return self.instance == SERVING

    def matches(self, event: Event, *, serving: Mapping[str, str], own: Iterable[str] = ()) -> bool:
        """`serving`: request → the instance that serves it; `own`: the requests that `#self` stands for."""
        return (
            event.kind in self.kinds
            and (self.instance is None or self._matches_instance(event, serving))
            and (self.request is None or self._matches_request(event, own))
        )

    def _matches_instance(self, event: Event, serving: Mapping[str, str]) -> bool:
        assert self.instance is not None
        if self.instance == SERVING:
            # Without a proxy there is no route, and but one instance that could serve.
            return event.instance == serving.get(event.request_id or "", event.instance)
        return event.instance is not None and bool(matcher(self.instance)(event.instance))

    def _matches_request(self, event: Event, own: Iterable[str]) -> bool:
        assert self.request is not None
        if event.request_id is None:
            return False
        return event.request_id in own if self.request == SELF else bool(matcher(self.request)(event.request_id))


def parse_event_pattern(text: str) -> EventPattern:
    """Raises ValueError naming the nearest kind of event if none matches."""
    rest, hash_sign, request = text.partition("#")
    kind, at_sign, instance = rest.partition("@")
    kinds = frozenset(known for known in KINDS if fnmatchcase(known, kind))
    if not kinds:
        hint = nearest(kind, KINDS, "; an event is a row's kind, such as request.parked")
        raise ValueError(f"names no event: no kind {kind!r}{hint}")
    if (hash_sign and not request) or (at_sign and not instance):
        raise ValueError(f"must be KIND[@INSTANCE][#REQUEST], got {text!r}")
    return EventPattern(text, kinds, instance or None, request or None)


Moment = int | EventPattern
"""Nanoseconds since the run's start, or the first event that matches."""


def parse_moment(text: str) -> Moment:
    """Raises ValueError with what a moment may be."""
    if text[:1] not in "+-.0123456789":
        return parse_event_pattern(text)
    if text.replace(".", "", 1).isdigit():
        raise ValueError(
            f"must be a time with its unit such as 500ms, 2s or 1m, or an event such as request.parked@D0, got {text!r}"
        )
    return parse_duration(text)


def format_moment(moment: Moment) -> str:
    return format_duration(moment) if isinstance(moment, int) else moment.text
