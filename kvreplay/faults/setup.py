"""Set-up faults: they change what a run starts from, not what happens in it."""

import tomllib
from collections.abc import Mapping
from typing import Any

from kvreplay.events import EventSink
from kvreplay.faults.choice import Choice, Window
from kvreplay.faults.patterns import matches_any
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.record import Record
from kvreplay.faults.spec import Fault


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


def rewrite_config(plan: FaultPlan, config: Mapping[str, Any], instance: str | None = None) -> dict[str, Any]:
    """The configuration's tables as the `config` faults change them, for one instance or (None) for all.

    Whoever reads the tables checks the values: a wrong key is a usage error like any other.
    """
    result = dict(config)
    for fault in plan:
        if fault.row.verb == "config" and _applies(fault, instance):
            _set(result, fault.settings["key"].split("."), _toml_value(fault.settings["value"]))
    return result


def _applies(fault: Fault, instance: str | None) -> bool:
    if instance is None or fault.instance is None:
        return instance is None and fault.instance is None
    return matches_any(fault.instance, [instance])


def _set(table: dict[str, Any], path: list[str], value: object) -> None:
    """Set a nested key, copying the tables on the way."""
    for name in path[:-1]:
        inner = table.get(name)
        table[name] = dict(inner) if isinstance(inner, Mapping) else {}
        table = table[name]
    table[path[-1]] = value


def _toml_value(text: str) -> object:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
