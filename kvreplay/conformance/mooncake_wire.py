"""Where a scenario's faults act: proxies before the producer's sockets, a front before its bootstrap server, and the
transfer engine's script.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec

from kvreplay.conformance.mooncake_scenario import matches
from kvreplay.conformance.mooncake_transcript import Transcript
from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake.bootstrap import BootstrapServer
from kvreplay.connectors.mooncake.discovery import CLOSED
from kvreplay.connectors.mooncake.structs import BootstrapAnswer, BootstrapQuery, WriteData
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_REGISTERED,
    PULL_REPLY,
    PULL_REQUEST,
    WRITE_DATA,
    Delivery,
    Envelope,
)
from kvreplay.transport.machine import StateMachine

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
    last_peer_first: bool = False
    """In which order a consumer's pulls reach the producer's ranks."""
    work_ns: int = 3 * NS_PER_MS
    """A step, from the start of its connector work to the poll at its end."""


class SteadyNetwork:
    def __init__(self, timing: Timing) -> None:
        self._timing = timing

    def transit_ns(self, envelope: Envelope, now_ns: int) -> int:
        timing = self._timing
        if envelope.kind == PULL_REQUEST and envelope.destination.endswith(REAL):
            return timing.connect_ns + timing.stagger_ns * _rank_of(envelope.payload)
        if envelope.kind == PULL_REQUEST:
            place = envelope.num_peers - 1 - envelope.peer_index if timing.last_peer_first else envelope.peer_index
            return timing.transit_ns * (1 + place)
        is_http = envelope.kind in (BOOTSTRAP_ANSWER, BOOTSTRAP_REGISTERED)
        return timing.http_ns if is_http else timing.transit_ns


_STATUS_NAMES: Final = {0: "FINISH", 1: "CONTINUE", 2: "ERROR", 3: "LAYOUT_MISS"}
_FIRST_CONSUMER_PORT: Final = 17101
_MAX_WORKERS: Final = 64
REAL: Final = "-real"
"""Ends the names of producer workers themselves; without it they are their proxies'."""


def seconds(value: float) -> int:
    return round(value * NS_PER_S)


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
            bus.loop.call_later(seconds(late_s), self._bind_late)
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
                delay_ns = seconds((rule or {})["s"])
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
            self._bus.loop.call_later(seconds(rule["s"]), lambda: self._deliver(connection, frame, forged="delayed"))
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
    return _STATUS_NAMES.get(status, "?") if isinstance(status, int) else "?", fields


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


# -- bootstrap --------------------------------------------------------------------------------------------


class BootstrapFront:
    """Answers queries by script, or as the real server does, with the proxies' addresses for the workers'."""

    def __init__(
        self, script: Sequence[Rule], server: BootstrapServer | None, bus: Bus, transcript: Transcript
    ) -> None:
        self._script = list(script)
        self._server = server
        self._bus = bus
        self._transcript = transcript
        self._number = 0
        bus.listen("BOOT/bootstrap", self._receive)

    def _receive(self, envelope: Envelope) -> None:
        query: BootstrapQuery = envelope.payload
        self._number += 1
        number = self._number
        rule: Rule = {"act": "pass"}
        if self._script:
            rule = self._script[0] if self._script[0].get("sticky") else self._script.pop(0)
        act = rule["act"]
        if act == "close":
            self._transcript.add("http", ["http"], req=query.path, n=number, act=act)
            self._answer(envelope, BootstrapAnswer(error=CLOSED))
        elif act == "hang":
            self._transcript.add("http", ["http"], req=query.path, n=number, act=act, s=rule["s"])
            self._later(rule["s"], lambda: self._answer(envelope, BootstrapAnswer(error=CLOSED)))
        else:
            answer = self._scripted(rule, query)
            self._later(rule.get("delay", 0), lambda: self._send(envelope, number, act, answer))

    def _scripted(self, rule: Rule, query: BootstrapQuery) -> BootstrapAnswer:
        if rule["act"] == "status":
            return BootstrapAnswer(rule["code"], rule.get("body", "{}").encode())
        if rule["act"] == "body":
            body = rule["body"]
            return BootstrapAnswer(200, (body if isinstance(body, str) else json.dumps(body)).encode())
        if self._server is None:
            return BootstrapAnswer(error=CLOSED)
        real = self._server.answer(query)
        if real.status != 200:
            return real
        engines = json.loads(real.body or b"{}")
        for engine in engines.values():
            for stages in engine["worker_addr"].values():
                for stage, address in stages.items():
                    if not address.endswith(REAL):
                        return BootstrapAnswer(error=CLOSED)  # no proxy stands for it
                    stages[stage] = address.removesuffix(REAL)
        if rule["act"] == "edit":
            _edit_engines(engines, rule)
        return BootstrapAnswer(200, json.dumps(engines).encode())

    def _send(self, query: Envelope, number: int, act: str, answer: BootstrapAnswer) -> None:
        if answer.error is None:
            body = (answer.body or b"").decode()
            path = query.payload.path
            self._transcript.add("http", ["http"], req=path, n=number, act=act, code=answer.status, body=body)
        self._answer(query, answer)

    def _later(self, delay_s: float, action: Callable[[], None]) -> None:
        self._bus.loop.call_later(seconds(delay_s), action)

    def _answer(self, query: Envelope, answer: BootstrapAnswer) -> None:
        self._bus.post(
            replace(query, kind=BOOTSTRAP_ANSWER, source=query.destination, destination=query.source, payload=answer)
        )


def _edit_engines(engines: dict[str, Any], rule: Rule) -> None:
    for engine in engines.values():
        if "rename" in rule:
            engine["engine_id"] = rule["rename"]
        for rank in rule.get("drop_tp", ()):
            engine["worker_addr"].pop(str(rank), None)
        for rank, stage in rule.get("drop_pp", ()):
            engine["worker_addr"][str(rank)].pop(str(stage), None)
        if "addr" in rule:
            for stages in engine["worker_addr"].values():
                stages.update(dict.fromkeys(stages, rule["addr"]))
    if "drop_dp" in rule:
        engines.pop(str(rule["drop_dp"]), None)
    engines.update(rule.get("add", {}))


class RegisteredServer:
    """A bootstrap server behind an address, as a state machine's owner."""

    def __init__(self, server: StateMachine, bus: Bus, host: str) -> None:
        self._server = server
        self._bus = bus
        bus.listen(f"{host}/bootstrap", self._receive)

    def _receive(self, envelope: Envelope) -> None:
        self._server.handle(envelope, self._bus.loop.now_ns)
        for answer in self._server.outbox:
            self._bus.post(answer)
        self._server.outbox.clear()


# -- the transfer engine ----------------------------------------------------------------------------------


class ScriptedEngine:
    """Every engine write passes here (`sim.envelope.Interceptor`): it is recorded, and goes as the script says."""

    kinds = frozenset({WRITE_DATA})

    def __init__(
        self, script: Sequence[Rule], transcript: Transcript, transit_ns: int, poke: Callable[[int, int], None]
    ) -> None:
        self._script = script
        self._transit_ns = transit_ns
        self._transcript = transcript
        self._poke = poke
        self._calls: dict[str, int] = {}

    def start_up_result(self, worker: str, call: str) -> int:
        """What `initialize` or `register` returns."""
        for rule in self._script:
            if rule.get("call") == call and matches(rule.get("on", "*"), worker):
                result: int = rule.get("ret", -1)
                return result
        return 0

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        worker = envelope.source.removesuffix(REAL)
        data: WriteData = envelope.payload
        number = self._calls[worker] = self._calls.get(worker, 0) + 1
        rule = self._rule_for(worker, number)
        descriptors = [list(piece.descriptor) for _, piece in data.plan.descriptors(data.segments)]
        told = {"rule": dict(rule)} if rule else {}
        keys = [f"write:{worker}", "write"]
        self._transcript.add(
            "engine", keys, who=worker, call="write", n=number, session=data.session, desc=descriptors, **told
        )
        return self._deliveries(envelope, rule, worker, number, descriptors)

    def has_passed(self, kind: str, conversation: str) -> bool:
        return False

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        raise AssertionError("nothing waits for events here")

    def _rule_for(self, worker: str, number: int) -> Rule:
        for rule in self._script:
            if matches(rule.get("on", "*"), worker) and rule.get("call", number) in (number, "*"):
                return rule
        return {}

    def _deliveries(
        self, envelope: Envelope, rule: Rule, worker: str, number: int, descriptors: list[list[int]]
    ) -> list[Delivery]:
        data: WriteData = envelope.payload
        delay_ns = seconds(rule.get("delay", 0))
        extent = {"all": len(descriptors), "none": 0}.get(rule.get("copy", "all"), rule.get("copy"))
        bytes_land = replace(data, lands=slice(0, extent), returns=False)
        returns = replace(data, lands=slice(0, 0), raises=rule.get("raise"))
        landing_ns = delay_ns + seconds(rule.get("late", 0))
        self._after(landing_ns, lambda: self._on_landed(rule, worker, number, descriptors))
        self._after(delay_ns, lambda: self._on_returned(rule, worker, number))
        result = rule.get("ret", 0)
        return [
            Delivery(replace(envelope, payload=bytes_land), landing_ns),
            Delivery(replace(envelope, payload=returns, write_result=result), delay_ns),
        ]

    def _after(self, delay_ns: int, action: Callable[[], None]) -> None:
        """Just after a delivery with that delay has arrived."""
        loop = self._transcript.loop
        loop.call_later(self._transit_ns + delay_ns + 1, action)

    def _on_landed(self, rule: Rule, worker: str, number: int, descriptors: list[list[int]]) -> None:
        for offset, value in rule.get("corrupt", ()):
            self._poke(descriptors[0][1] + offset, value)
        if "late" in rule:
            self._transcript.add("engine", ["late_land"], who=worker, call="late_land", n=number)

    def _on_returned(self, rule: Rule, worker: str, number: int) -> None:
        if "raise" in rule:
            self._transcript.add("engine", who=worker, call="write_end", n=number, raised=rule["raise"])
        else:
            keys = [f"write_end:{worker}", "write_end"]
            self._transcript.add("engine", keys, who=worker, call="write_end", n=number, ret=rule.get("ret", 0))
