"""The front before a scenario's bootstrap server, which answers by its script, and the server behind it."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from kvreplay.conformance.mooncake_transcript import Transcript
from kvreplay.conformance.mooncake_wire import REAL, Rule
from kvreplay.connectors.mooncake.bootstrap import BootstrapServer
from kvreplay.connectors.mooncake.discovery import CLOSED
from kvreplay.connectors.mooncake.structs import BootstrapAnswer, BootstrapQuery
from kvreplay.ids import nanoseconds
from kvreplay.sim.bus import Bus
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    Envelope,
)
from kvreplay.transport.machine import StateMachine


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
            # The recorder's front breaks off at once where it does not get so far as to answer.
            delay_s = rule.get("delay", 0) if answer.error is None else 0
            self._later(delay_s, lambda: self._send(envelope, number, act, answer))

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
        self._bus.loop.call_later(nanoseconds(delay_s), action)

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
