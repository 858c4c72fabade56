"""Proxies before the producer's sockets, where faults on pulls and replies act; and how long things take."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvreplay.conformance.mooncake_scenario import matches
from kvreplay.conformance.mooncake_transcript import Transcript
from kvreplay.conformance.vector import Json
from kvreplay.ids import NS_PER_MS, nanoseconds
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_REGISTERED,
    PULL_REPLY,
    PULL_REQUEST,
    Envelope,
)

Rule = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take: about what they took the recorder, for which scenarios are written."""

    transit_ns: int = NS_PER_MS // 5
    """A message."""
    connect_ns: int = 3 * NS_PER_MS
    """The first message over a new connection to a producer."""
    stagger_ns: int = 2 * NS_PER_MS
    """How much later than one rank of the consumer the next one connects."""
    repeat_ns: int = NS_PER_MS * 3 // 10
    """Between a frame and its duplicate: less than an engine write takes, more than a consumer's reaction."""
    forward_ns: int = NS_PER_MS // 2
    """Between two replies that come to a proxy together."""
    http_ns: int = 30 * NS_PER_MS
    """A bootstrap server's answer."""
    serves_in_turn: bool = False
    """Whether such answers come one after the other: ranks that ask together are threads of one interpreter."""
    last_peer_first: bool = False
    """In which order a consumer's pulls reach the producer's ranks."""
    work_ns: int = 3 * NS_PER_MS
    """A step, from the start of its connector work to the poll at its end."""


class SteadyNetwork:
    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._answered_until_ns = 0

    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        timing = self._timing
        if envelope.kind == PULL_REQUEST and envelope.destination.endswith(REAL):
            return timing.connect_ns + timing.stagger_ns * _rank_of(envelope.payload)
        if envelope.kind == PULL_REQUEST:
            place = envelope.num_peers - 1 - envelope.peer_index if timing.last_peer_first else envelope.peer_index
            return timing.transit_ns * (1 + place)
        if envelope.kind not in (BOOTSTRAP_ANSWER, BOOTSTRAP_REGISTERED):
            return timing.transit_ns
        start_ns = max(now_ns, self._answered_until_ns) if timing.serves_in_turn else now_ns
        self._answered_until_ns = start_ns + timing.http_ns
        return self._answered_until_ns - now_ns


_STATUS_NAMES: Final[Mapping[float, str]] = {0: "FINISH", 1: "CONTINUE", 2: "ERROR", 3: "LAYOUT_MISS"}
_FIRST_CONSUMER_PORT: Final = 17101
_MAX_WORKERS: Final = 64
REAL: Final = "-real"
"""Ends the names of producer workers themselves; without it they are their proxies'."""


# -- pulls and replies ------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Connection:
    """One DEALER socket of a consumer."""

    name: str
    pull: Envelope
    num_requests: int = 0
    num_replies: int = 0


class Rules:
    """The scenario's rules for one kind of thing; each is used once, unless it says `always`."""

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._used: set[int] = set()

    def pick(self, connection: str, direction: str, number: int, kind: str | None) -> Rule | None:
        for index, rule in enumerate(self._rules):
            if rule.get("dir", "rep") != direction or (index in self._used and not rule.get("always")):
                continue
            is_meant = matches(rule.get("conn", "*"), connection) and rule.get("n", number) == number
            if is_meant and ("type" not in rule or rule["type"] == kind):
                self._used.add(index)
                return rule
        return None


class Proxy:
    """Stands for one producer worker's socket, under its name; the worker itself is at `target`."""

    def __init__(
        self,
        name: str,
        target: str,
        rules: Rules,
        bus: Bus,
        transcript: Transcript,
        timing: Timing,
        is_open: Callable[[Envelope], bool],
        *,
        late_s: float,
    ) -> None:
        self._name = name
        self._target = target
        self._rules = rules
        self._bus = bus
        self._transcript = transcript
        self._timing = timing
        self._is_open = is_open
        self._connections: dict[tuple[str, str, int], _Connection] = {}
        self._num_of: dict[str, int] = {}
        self._free_at_ns = 0
        if late_s:
            bus.loop.call_later(nanoseconds(late_s), self._bind_late)
        else:
            bus.listen(name, self._receive)

    def _bind_late(self) -> None:
        self._bus.listen(self._name, self._receive)
        self._transcript.add("wire", conn=self._name, dir="-", type="BOUND", fields=None, hex="")

    def _receive(self, envelope: Envelope) -> None:
        if envelope.kind == PULL_REQUEST:
            self._on_pull(self._connect(envelope), envelope)
        else:
            assert envelope.kind == PULL_REPLY, envelope.kind
            key = next(key for key in self._connections if key[1:] == (envelope.conversation, envelope.attempt))
            connection, frame = self._connections[key], envelope.payload
            # One after the other: a consumer that is done has closed its socket before the next one.
            now_ns = self._bus.loop.now_ns
            self._free_at_ns = max(self._free_at_ns, now_ns)
            self._bus.loop.call_at(self._free_at_ns, lambda: self._on_reply(connection, frame))
            self._free_at_ns += self._timing.forward_ns

    def _connect(self, pull: Envelope) -> _Connection:
        key = (pull.source, pull.conversation, pull.attempt)
        connection = self._connections.get(key)
        if connection is None:
            consumer = _name_of_consumer(pull.payload)
            number = self._num_of[consumer] = self._num_of.get(consumer, 0) + 1
            connection = self._connections[key] = _Connection(f"{consumer}>{self._name}#{number}", pull)
        return connection

    def _on_pull(self, connection: _Connection, envelope: Envelope) -> None:
        frame: bytes = envelope.payload
        connection.num_requests += 1
        kind, fields = _shown_pull(frame)
        rule = self._rules.pick(connection.name, "req", connection.num_requests, kind)
        fault = {"fault": dict(rule)} if rule is not None else {}
        keys = ["req", f"req:{connection.name}", f"req:{self._name}"]
        self._wire(connection, "req", kind, fields, frame, keys, **fault)
        delay_ns = 0
        frames = [frame]
        match rule["act"] if rule is not None else None:
            case "drop":
                frames = []
            case "dup":
                frames = [frame, frame]
            case "edit":
                frames = [_edited(frame, rule or {})]
            case "replace":
                frames = [bytes.fromhex((rule or {})["hex"])]
            case "answer":
                frames = []
                for answer in (rule or {})["frames"]:
                    self._deliver(connection, msgspec.msgpack.encode(answer), forged=True)
            case "delay":
                delay_ns = nanoseconds((rule or {})["s"])
        for place, each in enumerate(frames):
            forwarded = replace(envelope, source=self._name, destination=self._target, payload=each)
            later_ns = delay_ns + place * self._timing.repeat_ns
            self._bus.loop.call_later(later_ns, lambda forwarded=forwarded: self._bus.post(forwarded))  # type: ignore[misc]

    def _on_reply(self, connection: _Connection, frame: bytes) -> None:
        connection.num_replies += 1
        kind, fields = _shown_reply(frame)
        rule = self._rules.pick(connection.name, "rep", connection.num_replies, kind) or {}
        act = rule.get("act")
        keys = ["rep", f"rep:{connection.name}", f"rep:{self._name}"]
        if act == "drop":
            self._wire(connection, "rep", kind, fields, frame, keys, fault={"act": "drop"}, delivered=False)
        elif act == "delay":
            fault = {"act": "delay", "s": rule["s"]}
            self._wire(connection, "rep", kind, fields, frame, fault=fault, delivered=False)
            self._bus.loop.call_later(
                nanoseconds(rule["s"]), lambda: self._deliver(connection, frame, forged="delayed")
            )
        elif act in ("replace", "edit"):
            self._wire(connection, "rep", kind, fields, frame, fault={"act": act}, delivered=False)
            self._deliver(connection, _forged_reply(fields, rule), forged=True)
        elif act == "dup":
            self._deliver(connection, frame)
            self._deliver(connection, frame, forged=True)
        else:
            injected = [msgspec.msgpack.encode(each) for each in rule.get("frames", ())]
            before, after = (injected, []) if act == "inject_before" else ([], injected)
            for each in before:
                self._deliver(connection, each, forged=True)
            self._deliver(connection, frame)
            for each in after:
                self._deliver(connection, each, forged=True)

    def _deliver(self, connection: _Connection, frame: bytes, *, forged: bool | str = False) -> None:
        kind, fields = _shown_reply(frame)
        event = self._wire(connection, "rep", kind, fields, frame)
        if forged:
            event["forged"] = forged
        pull = connection.pull
        event["delivered"] = self._is_open(pull)
        if event["delivered"]:
            reply = replace(
                pull, kind=PULL_REPLY, source=self._name, destination=pull.source, payload=frame, size_bytes=0
            )
            self._bus.post(reply)
        else:
            event["why"] = "Host unreachable"
        self._transcript.note(["rep", f"rep:{connection.name}", f"rep:{self._name}"])

    def _wire(
        self,
        connection: _Connection,
        direction: str,
        kind: str | None,
        fields: Json,
        frame: bytes,
        keys: Sequence[str] = (),
        **more: Json,
    ) -> dict[str, Json]:
        return self._transcript.add(
            "wire", keys, conn=connection.name, dir=direction, type=kind, fields=fields, hex=frame.hex(), **more
        )


def _rank_of(frame: bytes) -> int:
    """The number of a pull's consumer among the workers of its engine; 0 for what is no pull."""
    try:
        worker = msgspec.msgpack.decode(frame)["remote_port"] - _FIRST_CONSUMER_PORT
    except (msgspec.MsgspecError, KeyError, TypeError):
        return 0
    return worker if 0 <= worker < _MAX_WORKERS else 0


def _name_of_consumer(frame: bytes) -> str:
    try:
        fields = msgspec.msgpack.decode(frame)
        worker = fields["remote_port"] - _FIRST_CONSUMER_PORT
        rank = fields["remote_tp_rank"]
    except (msgspec.MsgspecError, KeyError, TypeError):
        return "D?"
    return f"D{rank}" + (f".{worker}" if worker != rank else "")


def _shown_pull(frame: bytes) -> tuple[str | None, Json]:
    fields = _decoded(frame)
    if not isinstance(fields, dict):
        return None, fields
    return "PULL" if fields.get("kv_caches_base_addr") else "PULL_NOLAYOUT", fields


def _shown_reply(frame: bytes) -> tuple[str | None, Json]:
    fields = _decoded(frame)
    if isinstance(fields, str) and fields.startswith("undecodable"):
        return None, fields
    status = fields.get("status") if isinstance(fields, dict) else None
    return _STATUS_NAMES.get(status, "?") if isinstance(status, int | float) else "?", fields


def _decoded(frame: bytes) -> Json:
    try:
        return msgspec.msgpack.decode(frame)
    except msgspec.MsgspecError as error:
        return f"undecodable: {type(error).__name__}"


def _edited(frame: bytes, rule: Rule) -> bytes:
    fields = msgspec.msgpack.decode(frame)
    fields.update(rule.get("set", {}))
    for name in rule.get("del", ()):
        fields.pop(name, None)
    return msgspec.msgpack.encode(fields)


def _forged_reply(fields: Json, rule: Rule) -> bytes:
    if rule["act"] == "replace":
        return bytes.fromhex(rule["hex"]) if "hex" in rule else msgspec.msgpack.encode(rule["frame"])
    edited = dict(fields)
    for name in ("ok_reqs", "err_reqs"):
        if edited.get(name):
            edited[name] = [request_id for request_id in edited[name] if request_id not in rule.get("omit", ())]
            if not edited[name]:
                del edited[name]
    edited.update(rule.get("set", {}))
    return msgspec.msgpack.encode(edited)
