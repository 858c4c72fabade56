"""An action fault at work: when it is due, whom it hits, and what it commands."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, NamedTuple

from kvreplay.events import Event, EventSink
from kvreplay.faults.choice import Choice, Window
from kvreplay.faults.patterns import EventPattern, Moment, matcher, matches_any, parse_event_pattern
from kvreplay.faults.record import Record
from kvreplay.faults.spec import Fault
from kvreplay.faults.verb import ActionVerb, Order
from kvreplay.sim.envelope import Command
from kvreplay.sim.event_loop import EventLoop, Timer

PRODUCER: Final = "producer"
"""Target of an action on the instance that an event's request is pulled from."""
Carrier = Callable[[str, Command], bool]
"""(control address, command) → whether it was carried out."""


class ActionFault:
    """One action fault of the plan. Nothing is commanded from within `observe`: the loop does it next."""

    def __init__(self, fault: Fault, verb: ActionVerb, seed: int, sink: EventSink, loop: EventLoop) -> None:
        self.fault = fault
        self.record = Record(fault, sink)
        self.moment = moment_of(fault, verb)
        self.window = Window(fault.after, fault.until)
        self._verb = verb
        self._loop = loop
        self._choice = Choice(fault, seed)
        self._decided: dict[str, None] = {}
        self._num_occurrences = 0
        self._targets: Sequence[str] = ()
        self._carry_out: Carrier | None = None
        self._timers: list[Timer] = []

    def arm(self, targets: Sequence[str], carry_out: Carrier) -> None:
        """From here on it acts: on `targets`, through `carry_out`. A plan's time keeps the run alive till then."""
        self._targets, self._carry_out = targets, carry_out
        if isinstance(self.moment, int):
            moment_ns = max(self.moment, self._loop.now_ns)
            self._timers.append(self._loop.call_at(moment_ns, partial(self._hit_instances, moment_ns)))

    def disarm(self) -> None:
        """Take back everything that has not happened yet."""
        self._carry_out = None
        for timer in self._timers:
            self._loop.cancel(timer)
        self._timers.clear()

    def observe(self, event: Event, serving: Mapping[str, str]) -> None:
        if isinstance(self.moment, EventPattern) and self.moment.matches(event, serving=serving):
            if self._verb.acts_on_requests:
                self._hit_request(event)
            else:
                self._hit_instances(event.time_ns)

    def _hit_request(self, event: Event) -> None:
        request_id, instance = event.request_id, event.instance
        actor = event.peer if self.fault.row.target == PRODUCER else instance
        if request_id is None or request_id in self._decided or event.time_ns not in self.window:
            return
        if matches_any(self.fault.request, [request_id]) and matches_any(self.fault.instance, [instance or ""]):
            self._decided[request_id] = None
            if self._choice.decide(request_id):
                orders = self._verb.orders(self.fault.settings, request_id)
                self._schedule(_Firing(request_id, request_id, actor), orders, event.time_ns)

    def _hit_instances(self, time_ns: int) -> None:
        """The moment has come once more. Without `p`, `nth` or `count` only the first time counts."""
        if time_ns not in self.window or (self._num_occurrences and self.fault.hits_everything):
            return
        self._num_occurrences += 1
        for instance in self._targets:
            if self._choice.decide(instance, self._num_occurrences):
                firing = _Firing(f"{instance}|{self._num_occurrences}", None, instance)
                self._schedule(firing, self._verb.orders(self.fault.settings, None), time_ns)

    def _schedule(self, firing: "_Firing", orders: Sequence[Order], time_ns: int) -> None:
        due_ns = max(time_ns + orders[0].delay_ns, self._loop.now_ns)
        self._timers.append(self._loop.call_at(due_ns, partial(self._carry_on, firing, orders)))

    def _carry_on(self, firing: "_Firing", orders: Sequence[Order]) -> None:
        """Give the first order; the next follows only if it was carried out."""
        address = "client" if self.fault.row.target == "client" else (firing.instance or "")
        if self._carry_out is None or not self._carry_out(address, orders[0].command):
            return
        now_ns = self._loop.now_ns
        named = orders[0].command.victims if firing.request_id is None else [firing.request_id]
        self.record.fire(firing.key, now_ns, named, instance=firing.instance)
        if orders[1:]:
            self._schedule(firing, orders[1:], now_ns)


class _Firing(NamedTuple):
    key: str
    request_id: str | None
    instance: str | None


def moment_of(fault: Fault, verb: ActionVerb) -> Moment:
    """When an action is due: at a time, or on an event."""
    if callable(verb.moment):
        return parse_event_pattern(verb.moment(fault.settings))
    moment: Moment = fault.settings[verb.moment]
    return moment


def targets_of(fault: Fault, instances: Mapping[str, str]) -> list[str]:
    """The instances that a fault on instances acts on: those of its glob, else the first producer."""
    if fault.instance is not None:
        return list(filter(matcher(fault.instance), instances))
    producers = [instance for instance, role in instances.items() if role in ("kv_producer", "kv_both")]
    return (producers or list(instances))[:1]
