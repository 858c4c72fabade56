"""What a run consists of, as far as a plan must know, and whether each of its faults can happen there."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError
from kvreplay.events import DETAIL_RUN, KINDS
from kvreplay.faults.action import PRODUCER, moment_of
from kvreplay.faults.patterns import SELF, SERVING, EventPattern, format_moment, matches_any
from kvreplay.faults.plan import FaultPlan
from kvreplay.faults.registry import VERBS
from kvreplay.faults.spec import Fault
from kvreplay.faults.verb import ActionVerb, MessageVerb, SetupVerb
from kvreplay.sim.envelope import BOOTSTRAP_REGISTER, CLIENT_ARRIVAL, RANK_REPORT

_ASKERS = ("kv_consumer", "kv_both")
_GIVERS = ("kv_producer", "kv_both")
_AT_CONSUMERS: Final = (
    *("request.routed", "bootstrap.queried", "bootstrap.answered"),
    *("pull.sent", "pull.replied", "pull.settled"),
)
_AT_PRODUCERS: Final = ("send.started", "send.finished", "send.expired")
"""Kinds of events of which only one end of a pair has any."""
_MOONCAKE: Final = frozenset({"mooncake"})
_TIERS: Final = frozenset({"offloading", "simple_cpu"})
_ANY: Final = _MOONCAKE | _TIERS
_MAKERS: Final[Mapping[str, frozenset[str]]] = {
    **dict.fromkeys(("pull", "send", "bootstrap"), _MOONCAKE),
    "store": _TIERS,
    **dict.fromkeys(("load", "lookup", "request.parked", "request.promoted"), _ANY),
}
"""Kind of event, or what it begins with → the connectors that make some."""
_AT_THE_END: Final = ("request.stalled", "run.summary")


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyInfo:
    """`instances`: id → `kv_role`, in order, empty where there is no connector; `commands`: the action and set-up
    verbs that the run carries out; `request_ids`: those of the workload, None if they are not known beforehand.
    """

    instances: Mapping[str, str]
    connectors: frozenset[str] = frozenset()
    commands: frozenset[str] = frozenset({"abort", "crash", "restart"})
    request_ids: Collection[str] | None = None
    num_ranks: int = 1
    num_groups: int = 1


def check_possible(plan: FaultPlan, topology: TopologyInfo) -> None:
    """Raises ConfigError for the first fault that nothing in this configuration can ever meet."""
    for fault in plan:
        _check_parts(fault, topology)
        _check_times(fault)
        _check_instances(fault, topology)
        _check_requests(fault, topology)
        _check_indices(fault, topology)
        for pattern in _patterns_of(fault):
            _check_pattern(fault, pattern, topology)


def _check_parts(fault: Fault, topology: TopologyInfo) -> None:
    needs, verb = fault.row.needs, VERBS[fault.row.verb]
    if needs and needs not in topology.connectors:
        have = ", ".join(sorted(topology.connectors)) or "none"
        raise ConfigError(f"{fault.origin}: {fault.name} needs the {needs} connector; configured: {have}")
    if isinstance(verb, ActionVerb | SetupVerb) and verb.name not in topology.commands:
        raise ConfigError(f"{fault.origin}: nothing in this configuration can carry out {verb.name}")


def _check_times(fault: Fault) -> None:
    """Times alone must leave it a moment; events may come in any order."""
    at = fault.settings.get("at")
    after, until = fault.after, fault.until
    if isinstance(after, int) and isinstance(until, int) and after >= until:
        raise ConfigError(
            f"{fault.origin}: after={format_moment(after)},until={format_moment(until)} leaves no time to act in"
        )
    if isinstance(at, int) and isinstance(after, int) and at < after:
        raise ConfigError(f"{fault.origin}: at={format_moment(at)} comes before after={format_moment(after)}")
    if isinstance(at, int) and isinstance(until, int) and at >= until:
        raise ConfigError(f"{fault.origin}: at={format_moment(at)} is not before until={format_moment(until)}")


def _check_instances(fault: Fault, topology: TopologyInfo) -> None:
    instances = topology.instances
    row, verb = fault.row, VERBS[fault.row.verb]
    # Of a pull's messages `instance` is the consumer's end, and `peer` the producer's.
    pulls = (
        row.needs == "mooncake" and isinstance(verb, MessageVerb) and row.target not in (CLIENT_ARRIVAL, RANK_REPORT)
    )
    for key, glob, roles in (("instance", fault.instance, _ASKERS), ("peer", fault.peer, _GIVERS)):
        able = [name for name, role in instances.items() if not pulls or role in roles]
        if row.target == BOOTSTRAP_REGISTER or (row.verb == "startup" and row.target == PRODUCER):
            able = [name for name, role in instances.items() if role in _GIVERS]
        if pulls and not able:
            raise ConfigError(f"{fault.origin}: no instance is a {' or '.join(roles)}")
        if not matches_any(glob, able):
            raise ConfigError(f"{fault.origin}: {key}={glob} matches no instance{_one_of(able)}")


def _one_of(names: Iterable[str]) -> str:
    names = list(names)
    if not names:
        return ""
    return f", expected {'one of ' if names[1:] else ''}{', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"


def _check_requests(fault: Fault, topology: TopologyInfo) -> None:
    ids = topology.request_ids
    if fault.request is not None and ids is not None and not matches_any(fault.request, ids):
        raise ConfigError(f"{fault.origin}: request={fault.request} matches none of {len(ids)} requests")


def _check_indices(fault: Fault, topology: TopologyInfo) -> None:
    for key, value, count in (
        ("rank", fault.rank, topology.num_ranks),
        ("group", fault.group, topology.num_groups),
    ):
        if value is not None and value >= count:
            raise ConfigError(f"{fault.origin}: {key} must be below {count}, got {value}")


def _patterns_of(fault: Fault) -> list[EventPattern]:
    verb = VERBS[fault.row.verb]
    moments = [fault.after, fault.until]
    if isinstance(verb, ActionVerb):
        moments.append(moment_of(fault, verb))
    return [moment for moment in moments if isinstance(moment, EventPattern)]


def _check_pattern(fault: Fault, pattern: EventPattern, topology: TopologyInfo) -> None:
    if all(_comes_too_late(kind) for kind in pattern.kinds):
        raise ConfigError(f"{fault.origin}: no fault can wait for {pattern.text}")
    missing = [_makers_of(kind) for kind in pattern.kinds]
    if all(makers is not None and not makers & topology.connectors for makers in missing):
        makers = sorted(frozenset().union(*filter(None, missing)))
        have = ", ".join(sorted(topology.connectors)) or "none"
        hint = "; its key when= says what it waits for" if "when" in fault.settings else ""
        raise ConfigError(
            f"{fault.origin}: waits for {pattern.text}, which needs {' or '.join(makers)}; configured: {have}{hint}"
        )
    ids = topology.request_ids
    if pattern.request not in (None, SELF) and ids is not None and not matches_any(pattern.request, ids):
        raise ConfigError(f"{fault.origin}: {pattern.text} matches none of {len(ids)} requests")
    instance = pattern.instance
    if instance in (None, SERVING):
        return
    if not matches_any(instance, topology.instances):
        raise ConfigError(f"{fault.origin}: {pattern.text} matches no instance{_one_of(topology.instances)}")
    at_consumers = all(kind in _AT_CONSUMERS for kind in pattern.kinds)
    if at_consumers or all(kind in _AT_PRODUCERS for kind in pattern.kinds):
        excluded = "kv_producer" if at_consumers else "kv_consumer"
        able = [name for name, role in topology.instances.items() if role != excluded]
        if not matches_any(instance, able):
            raise ConfigError(f"{fault.origin}: {pattern.text} happens nowhere{_one_of(able)}")


def _makers_of(kind: str) -> frozenset[str] | None:
    """The connectors that have such events; None: no connector is needed."""
    return _MAKERS.get(kind, _MAKERS.get(kind.partition(".")[0]))


def _comes_too_late(kind: str) -> bool:
    """Whether it is only told of when all faults are over, or only with a finer --detail, on which none may depend."""
    return kind in _AT_THE_END or KINDS[kind].detail > DETAIL_RUN
