"""Set-up faults: they change what a run starts from, not what happens in it."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from kvreplay.events import EventSink
from kvreplay.faults.action import targets_of
from kvreplay.faults.choice import Choice, Window
from kvreplay.faults.patterns import matches_any
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.record import Record
from kvreplay.faults.spec import Fault
from kvreplay.sim.catalogue import Death


class ArrivalFault:
    """One `arrival` fault of the plan: rewrites the transfer parameters of the requests that it chooses."""

    def __init__(self, fault: Fault, seed: int, sink: EventSink) -> None:
        assert fault.row.rewrite is not None, fault.name
        self.fault = fault
        self.record = Record(fault, sink)
        self.window = Window(fault.after, fault.until)
        self._rewrite = fault.row.rewrite
        self._choice = Choice(fault, seed)
        self._decided: dict[str, bool] = {}

    def apply(self, params: Mapping[str, Any], request_id: str, instance: str, now_ns: int) -> Mapping[str, Any]:
        if now_ns not in self.window or not matches_any(self.fault.instance, [instance]):
            return params
        if not matches_any(self.fault.request, [request_id]):
            return params
        rewritten = self._rewrite(params, self.fault.settings)
        if rewritten == params:
            return params
        if request_id not in self._decided:
            self._decided[request_id] = self._choice.decide(request_id)
        if not self._decided[request_id]:
            return params
        self.record.fire(request_id, now_ns, [request_id], instance=instance)
        return rewritten


class StartupFault:
    """One `startup` fault of the plan: an instance that it hits never comes up, until it is started again."""

    def __init__(self, fault: Fault, sink: EventSink) -> None:
        assert fault.row.dies_of is not None, fault.name
        self.fault = fault
        self.record = Record(fault, sink)
        self._dies_of = fault.row.dies_of
        self._hit: dict[str, None] = {}

    def death_of(self, instance: str, instances: Mapping[str, str], now_ns: int) -> Death | None:
        if instance in self._hit or instance not in targets_of(self.fault, instances):
            return None
        self._hit[instance] = None
        self.record.fire(instance, now_ns, [], instance=instance)
        return self._dies_of(self.fault.settings, instance)


class Override(NamedTuple):
    """A key of the configuration, its value as text, and the fault that says so, for messages."""

    key: str
    value: str
    origin: str


def overrides(plan: FaultPlan, instance: str | None = None) -> list[Override]:
    """What the plan's `config` faults change for this instance alone or, without one, for all."""
    return [
        Override(fault.settings["key"], fault.settings["value"], fault.origin)
        for fault in plan
        if fault.row.verb == "config" and _applies(fault, instance)
    ]


def _applies(fault: Fault, instance: str | None) -> bool:
    if instance is None or fault.instance is None:
        return instance is None and fault.instance is None
    return matches_any(fault.instance, [instance])
