"""The transfer engine of a scenario: it records every write, and lets it go as the script says."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from kvreplay.conformance.mooncake_scenario import matches
from kvreplay.conformance.mooncake_transcript import Transcript
from kvreplay.conformance.mooncake_wire import REAL, Rule
from kvreplay.connectors.mooncake.identity import WorkerIdentity
from kvreplay.connectors.mooncake.structs import WriteData
from kvreplay.ids import nanoseconds
from kvreplay.sim.envelope import (
    WRITE_DATA,
    Delivery,
    Envelope,
)


class ScriptedEngine:
    """Every engine write passes here (`sim.envelope.Interceptor`): it is recorded, and goes as the script says."""

    kinds = frozenset({WRITE_DATA})

    def __init__(
        self,
        script: Sequence[Rule],
        transcript: Transcript,
        transit_ns: int,
        poke: Callable[[int, int], None],
        owner_of: Callable[[int], WorkerIdentity | None],
    ) -> None:
        self._script = script
        self._transit_ns = transit_ns
        self._transcript = transcript
        self._poke = poke
        self._owner_of = owner_of
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

    def swallows(self, kind: str, conversation: str) -> bool:
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
        owner = self._owner_of(descriptors[0][1])
        if owner is not None:
            # The recorder's engine copies from address to address, whatever session it is told.
            payload = replace(envelope.payload, session=owner.session)
            envelope = replace(envelope, destination=owner.memory_address, payload=payload)
        data: WriteData = envelope.payload
        delay_ns = nanoseconds(rule.get("delay", 0))
        extent = {"all": len(descriptors), "none": 0}.get(rule.get("copy", "all"), rule.get("copy"))
        bytes_land = replace(data, lands=slice(0, extent), returns=False)
        returns = replace(data, lands=slice(0, 0), raises=rule.get("raise"))
        landing_ns = delay_ns + nanoseconds(rule.get("late", 0))
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
