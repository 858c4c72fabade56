"""The injector: all state of a plan while it runs. It stands between sender and receiver, and watches events."""

from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from kvreplay.events import Event, EventSink
from kvreplay.faults.action import ActionFault, targets_of
from kvreplay.faults.blame import Blame
from kvreplay.faults.holding import Holding
from kvreplay.faults.message import MessageFault
from kvreplay.faults.patterns import EventPattern
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.record import FaultStatistics, Record
from kvreplay.faults.registry import VERBS
from kvreplay.faults.setup import ArrivalFault, StartupFault
from kvreplay.faults.spec import Fault
from kvreplay.faults.topology import TopologyInfo
from kvreplay.faults.verb import ActionVerb, MessageVerb
from kvreplay.sim.bus import Bus
from kvreplay.sim.catalogue import Death
from kvreplay.sim.envelope import NEW_IDENTITY, Command, Delivery, Envelope
from kvreplay.sim.event_loop import EventLoop

Observer = Callable[[Event], None]


class ObservingSink:
    """Passes events on to another sink, and shows those of `kinds` to an observer."""

    def __init__(self, sink: EventSink, kinds: Container[str], observe: Observer) -> None:
        self.detail = sink.detail
        self._sink = sink
        self._kinds = kinds
        self._observe = observe

    def emit(self, event: Event) -> int:
        handle = self._sink.emit(event)
        if event.kind in self._kinds:
            self._observe(event)
        return handle


class Injector:
    """Carries out a plan. An `Interceptor` of the bus; `observe` wants every event of `observed_kinds`.

    All parts of a run emit to `sink`, which sees to that. Nothing acts before `arm`, and nothing after `heal`.
    """

    def __init__(self, plan: FaultPlan, seed: int, sink: EventSink, loop: EventLoop, bus: Bus) -> None:
        self.kinds: frozenset[str] = frozenset()
        self._loop, self._bus = loop, bus
        self._serving: dict[str, str] = {}
        self._down: dict[str, None] = {}
        self._observers: dict[str, list[Observer]] = defaultdict(list)
        watched_sink = ObservingSink(sink, self._observers, self.observe)

        self._messages: list[MessageFault] = []
        self._actions: list[ActionFault] = []
        self._arrivals: list[ArrivalFault] = []
        self._startups: list[StartupFault] = []
        self._config_records: list[Record] = []
        self._records = [self._take_on(fault, seed, watched_sink) for fault in plan]
        self.blame = Blame([record.hits for record in self._records])

        self._by_kind = {
            kind: [fault for fault in self._messages if fault.kind == kind]
            for kind in dict.fromkeys(fault.kind for fault in self._messages)
        }
        openers = (message.fault.row.opened_by for message in self._messages)
        self._opening_kinds = frozenset(kind for kind in openers if kind)
        self._requests_of: dict[str, tuple[str, ...]] = {}
        self._holdings = {
            pattern.text: Holding(pattern) for message in self._messages if (pattern := message.waits_for)
        }
        self._watch()
        self.sink: EventSink = watched_sink if self._observers else sink

    def _take_on(self, fault: Fault, seed: int, sink: EventSink) -> Record:
        verb = VERBS[fault.row.verb]
        if isinstance(verb, MessageVerb):
            self._messages.append(message := MessageFault(fault, verb, seed, sink))
            return message.record
        if isinstance(verb, ActionVerb):
            self._actions.append(action := ActionFault(fault, verb, seed, sink, self._loop))
            return action.record
        if fault.row.rewrite is not None:
            self._arrivals.append(arrival := ArrivalFault(fault, seed, sink))
            return arrival.record
        if fault.row.dies_of is not None:
            self._startups.append(startup := StartupFault(fault, sink))
            return startup.record
        self._config_records.append(record := Record(fault, sink))
        return record

    def count_elsewhere(self, ask: Callable[[int, str], bool]) -> None:
        """Parts of one run in several processes: ask where all are counted, by the fault's place in the plan and the
        conversation."""
        for place, fault in self._messages_by_place().items():
            if fault.fault.nth is not None or fault.fault.count is not None:
                fault.decide = partial(ask, place)

    def decide(self, place: int, conversation: str) -> bool:
        """Whether the fault at this place of the plan hits the conversation, the next that matches anywhere."""
        return self._messages_by_place()[place].decide(conversation)

    def _messages_by_place(self) -> dict[int, MessageFault]:
        places = {id(record): place for place, record in enumerate(self._records)}
        return {places[id(message.record)]: message for message in self._messages}

    def arm(self, topology: TopologyInfo) -> None:
        """Start: intercept messages, schedule what is due at a time. The plan must be possible in `topology`."""
        self.arm_messages()
        self.arm_actions(topology)

    def arm_messages(self) -> None:
        """Act on messages only: a part of a run that carries out no actions."""
        self.kinds = frozenset(self._by_kind) | self._opening_kinds
        if self.kinds:
            self._bus.interceptor = self

    def arm_actions(self, topology: TopologyInfo) -> None:
        """Carry out actions only: a part of a run that has no messages to act on."""
        for record in self._config_records:
            record.fire("config", self._loop.now_ns, [])
        for action in self._actions:
            action.arm(targets_of(action.fault, topology.instances), self._carry_out)

    # -- messages ----------------------------------------------------------------------------------------

    def intercept(self, envelope: Envelope, now_ns: int) -> list[Delivery] | None:
        if envelope.kind in self._opening_kinds:
            self._requests_of.setdefault(envelope.conversation, envelope.request_ids)
        faults = self._by_kind.get(envelope.kind, [])
        for index, fault in enumerate(faults):
            if fault.chooses(envelope, now_ns):
                return self._compose(envelope, now_ns, faults[:index])
        return None

    def has_passed(self, kind: str, conversation: str) -> bool:
        return kind not in self._opening_kinds and all(
            fault.has_passed(conversation) for fault in self._by_kind.get(kind, ())
        )

    def swallows(self, kind: str, conversation: str) -> bool:
        faults = self._by_kind.get(kind, ())
        return (
            kind not in self._opening_kinds
            and any(fault.swallows(conversation) for fault in faults)
            and all(fault.swallows(conversation) or fault.has_passed(conversation) for fault in faults)
        )

    def _compose(self, envelope: Envelope, now_ns: int, passed: Sequence[MessageFault]) -> list[Delivery]:
        """Let all faults act in the plan's order, each on what those before it have left.

        A fault decides on the message as it was sent, even if nothing of it is left: which conversations it
        counts does not depend on the faults before it.
        """
        deliveries = [Delivery(envelope)]
        for fault in self._messages:
            if fault in passed:
                continue
            chosen = fault.kind == envelope.kind and fault.chooses(envelope, now_ns)
            deliveries = [
                result
                for delivery in deliveries
                for result in self._act(fault, delivery, envelope, now_ns, chosen=chosen)
            ]
        return deliveries

    def _act(
        self, fault: MessageFault, delivery: Delivery, sent: Envelope, now_ns: int, *, chosen: bool
    ) -> list[Delivery]:
        if delivery.envelope.kind != fault.kind:
            return [delivery]
        if sent.kind != fault.kind:  # another fault has made it this fault's kind
            chosen = fault.chooses(delivery.envelope, now_ns)
        if not chosen:
            return [delivery]
        return fault.apply(delivery, now_ns, self._requests_of.get(delivery.envelope.conversation, ()))

    def hold(self, delivery: Delivery, release: Callable[[], None]) -> None:
        self._holdings[delivery.waits_for].add(delivery.envelope.request_ids, release)

    def rewrite_params(self, params: Mapping[str, Any], request_id: str, instance: str) -> Mapping[str, Any]:
        """A request's `kv_transfer_params` as they arrive at `instance`."""
        for arrival in self._arrivals:
            params = arrival.apply(params, request_id, instance, self._loop.now_ns)
        return params

    def death_at_start(self, instances: Mapping[str, str], instance: str) -> Death | None:
        """What this one of the run's instances (id → `kv_role`) dies of while it starts; None: nothing."""
        for startup in self._startups:
            death = startup.death_of(instance, instances, self._loop.now_ns)
            if death is not None:
                return death
        return None

    # -- events ------------------------------------------------------------------------------------------

    @property
    def observed_kinds(self) -> frozenset[str]:
        """Kinds of events that some fault waits for."""
        return frozenset(self._observers)

    def observe(self, event: Event) -> None:
        """Take note of an event. What it triggers is scheduled, never done from within this call."""
        for observer in self._observers.get(event.kind, ()):
            observer(event)

    def _watch(self) -> None:
        """Register who wants which kinds; where requests are served comes first, as the others ask for it."""
        windows = [message.window for message in self._messages]
        windows += [action.window for action in self._actions]
        windows += [arrival.window for arrival in self._arrivals]
        actions = [(action, action.moment) for action in self._actions]
        patterns = [pattern for window in windows for pattern in window.patterns]
        patterns += [holding.pattern for holding in self._holdings.values()]
        patterns += [moment for _, moment in actions if isinstance(moment, EventPattern)]
        if any(pattern.needs_routes for pattern in patterns):
            self._observers["request.routed"].append(self._note_route)

        for window in windows:
            self._register(window.patterns, partial(_observe_with, window.observe, self._serving))
        for holding in self._holdings.values():
            self._register([holding.pattern], partial(self._release_matching, holding))
        for message in self._messages:
            for kind in message.fault.row.catches:
                self._observers[kind].append(message.catch)
        for action, moment in actions:
            if isinstance(moment, EventPattern):
                self._register([moment], partial(_observe_with, action.observe, self._serving))

    def _register(self, patterns: Iterable[EventPattern], observer: Observer) -> None:
        for kind in dict.fromkeys(kind for pattern in patterns for kind in sorted(pattern.kinds)):
            self._observers[kind].append(observer)

    def _note_route(self, event: Event) -> None:
        if event.request_id is not None and event.instance is not None:
            self._serving[event.request_id] = event.instance

    def _release_matching(self, holding: Holding, event: Event) -> None:
        for release in holding.take(event, self._serving):
            # An instance may report ahead of the clock what it will do; the delivery waits for that too.
            self._loop.call_at(max(event.time_ns, self._loop.now_ns), release)

    # -- actions -----------------------------------------------------------------------------------------

    def _carry_out(self, address: str, command: Command) -> bool:
        if not self._bus.command(address, command):
            return False
        if command.verb == "crash":
            self._bus.cut(address)
            self._down[address] = None
        elif command.verb == "restart":
            self._down.pop(address, None)
        return True

    # -- the end -----------------------------------------------------------------------------------------

    def heal(self) -> None:
        """End all faults: nothing fires any more, what is held is let go, what was crashed comes back."""
        self.kinds = frozenset()
        self._observers.clear()
        for action in self._actions:
            action.disarm()
        for holding in self._holdings.values():
            for release in holding.take_all():
                release()
        for instance in list(self._down):
            self._bus.command(instance, Command("restart", {"identity": NEW_IDENTITY}))
        self._down.clear()
        self._arrivals.clear()
        self._startups.clear()

    @property
    def num_held(self) -> int:
        """Deliveries that wait for an event."""
        return sum(map(len, self._holdings.values()))

    def statistics(self) -> list[FaultStatistics]:
        """One per fault, in the plan's order."""
        return [record.statistics for record in self._records]


def _observe_with(
    observe: Callable[[Event, Mapping[str, str]], None], serving: Mapping[str, str], event: Event
) -> None:
    observe(event, serving)
