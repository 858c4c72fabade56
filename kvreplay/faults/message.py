"""A message fault at work: which messages it hits, and what becomes of them."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from kvreplay.events import Event, EventSink
from kvreplay.faults.choice import Choice, Window
from kvreplay.faults.patterns import EventPattern, matcher
from kvreplay.faults.record import Record
from kvreplay.faults.spec import Fault
from kvreplay.faults.verb import MessageVerb
from kvreplay.sim.bus import owner_of
from kvreplay.sim.envelope import (
    BOOTSTRAP_QUERY,
    BOOTSTRAP_REGISTER,
    COPY_JOB,
    LOOKUP,
    PULL_REQUEST,
    RANK_REPORT,
    WRITE_DONE,
    Corruption,
    Delivery,
    Envelope,
)

_PASSED, _CHOSEN = 0, 1

_ASKING: Final = frozenset(
    {PULL_REQUEST, BOOTSTRAP_QUERY, BOOTSTRAP_REGISTER, LOOKUP, COPY_JOB, WRITE_DONE, RANK_REPORT}
)
"""Kinds whose sender is the end that wants something; with the others it is the receiver. So the `instance` of
every fault of one pull is its consumer, and `peer` its producer."""


def ends_of(envelope: Envelope) -> tuple[str, str]:
    """Addresses of the end that a fault's `instance` means, and of the other, its `peer`."""
    if envelope.kind in _ASKING:
        return envelope.source, envelope.destination
    return envelope.destination, envelope.source


class MessageFault:
    """One message fault of the plan, with the conversations that it has chosen."""

    def __init__(self, fault: Fault, verb: MessageVerb, seed: int, sink: EventSink) -> None:
        self.fault = fault
        self.kind = fault.row.target
        self.record = Record(fault, sink)
        until = fault.until
        self.waits_for = until if verb.holds and isinstance(until, EventPattern) else None
        self.window = Window(fault.after, None if self.waits_for else until)
        self._verb = verb
        self._choice = Choice(fault, seed)
        self.decide: Callable[[str], bool] = self._choice.decide
        """Whether it hits this conversation, the next that matches."""
        self._states: dict[str, int] = {}
        self._draws: dict[str, int] = {}
        self._struck: dict[tuple[str | None, str | None], str] = {}
        self._tests = _tests_of(fault)
        self._settings: Mapping[str, Any] = {
            "request": fault.request,
            "group": fault.group,
            **fault.settings,
            "until": self.waits_for.text if self.waits_for else "",
        }

    def chooses(self, envelope: Envelope, now_ns: int) -> bool:
        """Whether it hits this message. A conversation's first message that matches decides for all of it."""
        key = envelope.conversation or _key_of(envelope)
        state = self._states.get(key)
        if state == _PASSED or (state is None and not self._matches(envelope, now_ns)):
            return False
        selects = self.fault.row.selects
        if selects is not None and not selects(envelope, self._settings):
            return False
        if state is None:
            state = self._states[key] = _CHOSEN if self.decide(key) else _PASSED
        return state == _CHOSEN

    def has_passed(self, conversation: str) -> bool:
        """Whether it has decided against this conversation, or is done with it: for good."""
        return self._states.get(conversation) == _PASSED

    def swallows(self, conversation: str) -> bool:
        """Whether it drops all that is still to come of this conversation."""
        row = self.fault.row
        is_lost = self.fault.row.verb == "drop" and row.whole_conversation and row.victims is None
        return is_lost and self._states.get(conversation) == _CHOSEN

    def _matches(self, envelope: Envelope, now_ns: int) -> bool:
        return now_ns in self.window and (not self._tests or all(test(envelope) for test in self._tests))

    def apply(self, delivery: Delivery, now_ns: int, requests: tuple[str, ...] = ()) -> list[Delivery]:
        """What becomes of a chosen message. It may still be left alone: none of its requests is a victim.

        `requests`: all of the conversation, if the row wants them remembered.
        """
        envelope, row = delivery.envelope, self.fault.row
        key = envelope.conversation or _key_of(envelope)
        if self._states.get(key) != _CHOSEN:
            return [delivery]  # a copy, when the first one has used the choice up
        draw = self._draws.get(key)
        if draw is None:
            draw = self._draws[key] = self._choice.draw(key)
        settings = {**self._settings, "requests": requests or envelope.request_ids}
        if row.selects is not None and not row.selects(envelope, settings):
            return [delivery]  # another fault has left nothing that this one could act on
        victims = row.victims(envelope, settings, draw) if row.victims else envelope.request_ids
        if row.victims and not victims:
            return [delivery]
        if not row.whole_conversation:
            self._states[key] = _PASSED
        handle = self._report(envelope, victims, key, now_ns)
        return [
            _on_top_of(delivery, result, self.fault.spec, handle)
            for result in self._verb.deliveries(row, envelope, settings, draw)
        ]

    def catch(self, event: Event) -> None:
        """Name the event's request too, if it has gone down with a conversation that this fault has hit."""
        key = self._struck.get((event.instance, event.peer))
        if key is None or event.request_id is None or not self.fault.row.catches[event.kind](event):
            return
        self.record.fire(
            key,
            event.time_ns,
            [event.request_id],
            instance=event.instance,
            peer=event.peer,
            transfer_ids=[event.transfer_id] if event.transfer_id else [],
        )

    def _report(self, envelope: Envelope, victims: tuple[str, ...], key: str, now_ns: int) -> int:
        instance, peer = map(owner_of, ends_of(envelope))
        if self.fault.row.catches:
            self._struck[instance, peer] = key
        transfer_of = dict(zip(envelope.request_ids, envelope.transfer_ids, strict=False))
        return self.record.fire(
            key,
            now_ns,
            victims,
            instance=instance,
            peer=peer,
            transfer_ids=[transfer_of[victim] for victim in victims if victim in transfer_of],
        )


def _key_of(envelope: Envelope) -> str:
    """What stands for the conversation of a message that has none: itself."""
    return "|".join((envelope.kind, envelope.source, envelope.destination, *envelope.request_ids))


def _on_top_of(before: Delivery, after: Delivery, spec: str, handle: int) -> Delivery:
    """A fault's result, with what earlier faults had already done to this delivery."""
    envelope = replace(after.envelope, fault_handle=handle)
    if any(not corruption.fault_spec for corruption in envelope.corruptions):
        signed = tuple(_signed(corruption, spec, handle) for corruption in envelope.corruptions)
        envelope = replace(envelope, corruptions=signed)
    return Delivery(envelope, before.delay_ns + after.delay_ns, after.waits_for or before.waits_for)


def _signed(corruption: Corruption, spec: str, handle: int) -> Corruption:
    if corruption.fault_spec:
        return corruption
    return replace(corruption, fault_spec=spec, fault_handle=handle)


# -- the common keys -------------------------------------------------------------------------------------


def _rank_of(address: str) -> str:
    """`1` of `D0/mooncake/1` and, after a restart, of `D0/mooncake/1#2`."""
    return address.rpartition("/")[2].partition("#")[0]


Test = Callable[[Envelope], object]


def _tests_of(fault: Fault) -> list[Test]:
    """One test for each common key that was given, the cheap ones first."""
    tests: list[Test] = []
    if fault.rank is not None:
        rank = str(fault.rank)
        tests.append(lambda envelope: _rank_of(ends_of(envelope)[0]) == rank)
    if fault.instance is not None:
        is_instance = matcher(fault.instance)
        tests.append(lambda envelope: is_instance(owner_of(ends_of(envelope)[0])))
    if fault.peer is not None:
        is_peer = matcher(fault.peer)
        tests.append(lambda envelope: is_peer(owner_of(ends_of(envelope)[1])))
    if fault.request is not None:
        is_request = matcher(fault.request)
        tests.append(lambda envelope: any(map(is_request, envelope.request_ids)))
    return tests
