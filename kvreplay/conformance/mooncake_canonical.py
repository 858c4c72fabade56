"""What of two transcripts must agree: views of them without what the recorder's README calls undefined.

Undefined are times, the order of what different threads do, the order of requests within one batch, whether a
failure and its completion come in one poll or in two, and whether what comes after a last reply still finds a socket.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake import log

Event = Mapping[str, Json]

_UNDEFINED: Final = frozenset({"i", "t", "lane", "th", "exc", "at"})
_HTTP_TEXTS: Final = (log.QUERY_RETRIED, log.QUERY_FAILED, log.REGISTER_RETRIED)
"""Lines with what an HTTP client says in them: their last text is its own."""
_ID_LISTS: Final = (log.PULL_FAILED, log.NOT_READY, log.PULL_FINISHED, log.PULL_SENT)
"""Lines whose first argument is the requests of a batch."""
_OPEN_ENDED: Final = ("CONTINUE", "LAYOUT_MISS")
"""Replies after which a consumer may go on to listen."""
_HEAD: Final = ("bases", "page_bytes", "layout_id")
_CRASH_TEXT: Final = 40


@dataclass(slots=True)
class Item:
    """One entry of a lane, and the number of the event that it comes from."""

    number: int
    value: Json


@dataclass(slots=True)
class Canonical:
    """`lanes`: what must come in this order. `bags`: what must be there, in any order."""

    lanes: dict[str, list[Item]] = field(default_factory=dict)
    bags: dict[str, list[Item]] = field(default_factory=dict)
    values: dict[str, Json] = field(default_factory=dict)
    states: dict[str, list[Item]] = field(default_factory=dict)
    """Worker → states of its transfers as they were seen."""
    ends: dict[str, int] = field(default_factory=dict)
    over: set[str] = field(default_factory=set)
    """Connections whose last reply has been delivered."""


@dataclass(frozen=True, slots=True)
class Freedom:
    """What of a scenario makes more of its order undefined."""

    several_requests: bool
    several_workers: bool


def canonical(document: Mapping[str, Json], freedom: Freedom) -> Canonical:
    """Of a transcript's JSON object: its head, events and `final`."""
    view = Canonical()
    view.values.update({f"head.{name}": document.get(name) for name in _HEAD})
    view.values.update({f"final.{name}": value for name, value in document.get("final", {}).items()})
    has_begun = False
    for number, event in enumerate(document["events"]):
        has_begun = has_begun or event["lane"] == "act"
        handler = _HANDLERS.get(event["lane"], _plain_lane)
        if event["lane"] != "log" or has_begun or event["lvl"] not in (log.INFO, log.DEBUG):
            handler(view, number, event, freedom)
    view.lanes["http"] = sorted(view.lanes.get("http", []), key=lambda item: item.value["n"])
    return view


def _fields(event: Event) -> dict[str, Json]:
    return {name: value for name, value in event.items() if name not in _UNDEFINED}


def _plain_lane(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    view.lanes.setdefault(event["lane"], []).append(Item(number, _fields(event)))


def _by_side(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    view.lanes.setdefault(f"{event['lane']}:{event['side']}", []).append(Item(number, _fields(event)))


def _engine(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    """Calls in their order; when each returned, other threads' calls may have begun."""
    fields = _fields(event)
    if freedom.several_requests and "desc" in fields:
        fields["desc"] = sorted(fields["desc"])
    lane = f"engine:{event['who']}"
    if event["call"] in ("write_end", "late_land"):
        view.bags.setdefault(f"{lane}:{event['call']}", []).append(Item(number, fields))
    elif event["call"] == "write" and freedom.several_workers:
        # Consumers of one rank are served by threads of their own.
        del fields["n"]
        view.bags.setdefault(f"{lane}:write", []).append(Item(number, fields))
    else:
        view.lanes.setdefault(lane, []).append(Item(number, fields))


def _wire(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    fields = _fields(event)
    if freedom.several_requests and event["dir"] == "rep" and isinstance(fields["fields"], Mapping):
        fields["fields"] = _in_any_order(fields["fields"])
        fields["hex"] = _in_any_order(msgspec.msgpack.decode(bytes.fromhex(fields["hex"])))
    if event["dir"] == "rep" and "fault" not in event:
        if event["conn"] in view.over:
            # Whether the consumer has already closed its socket, nobody can tell.
            fields = {name: value for name, value in fields.items() if name not in ("delivered", "why")}
        elif event.get("delivered") and event["type"] not in _OPEN_ENDED:
            view.over.add(event["conn"])
    view.lanes.setdefault(f"wire:{event['conn']}", []).append(Item(number, fields))


def _in_any_order(reply: Json) -> Json:
    """A reply without the order of its requests."""
    if not isinstance(reply, Mapping):
        return reply
    return {name: sorted(value) if isinstance(value, list) else value for name, value in reply.items()}


def _log(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    if event["src"] == "asyncio" or event["msg"] == log.POLLED:
        return
    fields = _fields(event)
    args = fields.get("args")
    args = list(args) if isinstance(args, list) else args
    if event["msg"] in _HTTP_TEXTS:
        place = 2 if event["msg"] == log.QUERY_FAILED else 4
        if isinstance(args, list) and place < len(args):
            args[place] = "..."
    if event["msg"] in _ID_LISTS and isinstance(args, list) and args and isinstance(args[0], list):
        args[0] = sorted(args[0])
    fields["args"] = args
    thread = event.get("th", "")
    # Threads of a pool, and a loop that talks to several peers, say things in no order.
    groups = view.bags if freedom.several_workers or thread == "vllm" else view.lanes
    groups.setdefault(f"log:{thread}", []).append(Item(number, fields))


def _report(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    side = event["side"]
    for worker, report in event["workers"].items():
        for name, value in report.items():
            if name != "stats":
                _sum_up(view, f"report.{side}.{worker}.{name}", number, sorted(value), is_sorted=True)
                continue
            for what, amount in value.items():
                is_sorted = freedom.several_requests
                _sum_up(view, f"report.{side}.{worker}.stats.{what}", number, amount, is_sorted=is_sorted)
    for name, value in event.get("aggregated", {}).items():
        _sum_up(view, f"report.{side}.aggregated.{name}", number, value, is_sorted=True, is_set=True)


def _sum_up(view: Canonical, key: str, number: int, amount: Json, *, is_sorted: bool, is_set: bool = False) -> None:
    known = view.values.get(key, 0 if isinstance(amount, int) else [])
    total = known + amount
    if is_set:
        total = list(dict.fromkeys(total))
    view.values[key] = sorted(total) if is_sorted and isinstance(total, list) else total
    view.ends[key] = number


def _entries(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    for worker, state in event["p"].items():
        seen = view.states.setdefault(worker, [])
        if not seen or seen[-1].value != state:
            seen.append(Item(number, state))


def _sched(view: Canonical, number: int, event: Event, freedom: Freedom) -> None:
    side = event["side"]
    for request_id, tokens, reason in event.get("out", ()):
        view.lanes.setdefault(f"out:{side}:{request_id}", []).append(Item(number, [tokens, reason]))
    for part in ("scheduled", "meta", "fin_prev"):
        if part in event:
            view.lanes.setdefault(f"{part}:{side}", []).append(Item(number, event[part]))
    if "after" in event:
        _note_state(view, number, side, event["after"])


def _note_state(view: Canonical, number: int, side: str, state: Mapping[str, Json]) -> None:
    """Each part of a scheduler's state by itself: what changes in one step there may change in two here."""
    parts: dict[str, Json] = {name: state.get(name) for name in ("free", "cached", "failed", "recvd")}
    prefix = f"after:{side}:req."
    known = {lane.removeprefix(prefix) for lane in view.lanes if lane.startswith(prefix)}
    parts |= {f"req.{request_id}": None for request_id in known}
    parts |= {f"req.{request_id}": row for request_id, row in state["req"].items()}
    for name, value in parts.items():
        lane = view.lanes.setdefault(f"after:{side}:{name}", [])
        if not lane or lane[-1].value != value:
            lane.append(Item(number, value))


_HANDLERS: Final[Mapping[str, Callable[[Canonical, int, Event, Freedom], None]]] = {
    "meta": _by_side,
    "engine": _engine,
    "wire": _wire,
    "log": _log,
    "report": _report,
    "entries": _entries,
    "sched": _sched,
}


# -- comparison -------------------------------------------------------------------------------------------


def differences(expected: Canonical, got: Canonical, all_states: Mapping[str, Sequence[Json]]) -> list[Difference]:
    """What differs, the earliest first. `all_states`: every state that each worker's transfers were in."""
    found = [
        *_different_lanes(expected, got),
        *_different_bags(expected, got),
        *_different_states(expected, all_states),
        *_different_values(expected, got),
    ]
    found.sort(key=lambda difference: difference.step if difference.step is not None else 1 << 60)
    return found


def _different_lanes(expected: Canonical, got: Canonical) -> Iterator[Difference]:
    for lane in sorted({*expected.lanes, *got.lanes}):
        left, right = expected.lanes.get(lane, []), got.lanes.get(lane, [])
        for place in range(max(len(left), len(right))):
            want = left[place] if place < len(left) else None
            have = right[place] if place < len(right) else None
            if want is None or have is None:
                number = want.number if want is not None else (left[-1].number if left else None)
                missing = None if want is None else want.value
                yield Difference(number, f"{lane}[{place}]", missing, None if have is None else have.value)
                break
            if not _is_same(lane, want.value, have.value):
                yield from _narrowed(want.number, f"{lane}[{place}]", want.value, have.value)
                break


def _is_same(lane: str, want: Json, have: Json) -> bool:
    if lane != "crash":
        return bool(want == have)
    if {**want, "msg": ""} != {**have, "msg": ""}:
        return False
    start = min(len(want["msg"]), len(have["msg"]), _CRASH_TEXT)
    return bool(want["msg"][:start] == have["msg"][:start] and bool(want["msg"]) == bool(have["msg"]))


def _narrowed(number: int | None, name: str, want: Any, have: Any) -> Iterator[Difference]:  # noqa: ANN401 - JSON
    """The parts of two objects that differ."""
    if isinstance(want, Mapping) and isinstance(have, Mapping):
        for key in dict.fromkeys((*want, *have)):
            if want.get(key) != have.get(key):
                yield from _narrowed(number, f"{name}.{key}", want.get(key), have.get(key))
    else:
        yield Difference(number, name, want, have)


def _different_bags(expected: Canonical, got: Canonical) -> Iterator[Difference]:
    for bag in sorted({*expected.bags, *got.bags}):
        surplus = [item.value for item in got.bags.get(bag, [])]
        lacking: list[Item] = []
        for item in expected.bags.get(bag, []):
            if item.value in surplus:
                surplus.remove(item.value)
            else:
                lacking.append(item)
        for place, item in enumerate(lacking):
            yield Difference(item.number, bag, item.value, surplus[place] if place < len(surplus) else None)
        for value in surplus[len(lacking) :]:
            yield Difference(None, bag, None, value)


def _different_states(expected: Canonical, all_states: Mapping[str, Sequence[Json]]) -> Iterator[Difference]:
    """Every state that a poll of the real one saw, ours must have been in, in that order."""
    for worker, seen in sorted(expected.states.items()):
        ours = iter([{}, *all_states.get(worker, [])])
        for item in seen:
            if not any(_is_same_state(item.value, state) for state in ours):
                states = list(all_states.get(worker, []))
                yield Difference(item.number, f"entries.{worker}", item.value, states[-1] if states else None)
                break


def _is_same_state(seen: Mapping[str, Json], ours: Mapping[str, Json]) -> bool:
    return seen == ours


def _different_values(expected: Canonical, got: Canonical) -> Iterator[Difference]:
    for key in dict.fromkeys((*expected.values, *got.values)):
        if expected.values.get(key) != got.values.get(key):
            number = expected.ends.get(key)
            yield from _narrowed(number, key, expected.values.get(key), got.values.get(key))
