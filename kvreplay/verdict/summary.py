"""The whole summary of a run, from its trace and the little that the trace cannot say."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import msgspec
import polars as pl

from kvreplay.checkers.finding import NO_FATAL, Finding, recorded_findings
from kvreplay.checkers.frames import rows_of
from kvreplay.checkers.no_fatal import is_action_on_instance, is_of_whole_instance, unfaulted_failures
from kvreplay.faults.catalogue import catalogue
from kvreplay.ids import NS_PER_S, nanoseconds
from kvreplay.sim.envelope import BOOTSTRAP_REGISTER
from kvreplay.sim.event_loop import FOREVER_NS
from kvreplay.verdict import counts
from kvreplay.verdict.attach import Attached, StallKey, attach
from kvreplay.verdict.circles import circular_waits
from kvreplay.verdict.model import Crash, FaultCount, InEffect, Requests, Stall, Summary, Violation
from kvreplay.verdict.outcomes import Outcomes, count_reasons, count_requests, followers, latency, outcomes, outcomes_of
from kvreplay.verdict.tiers import tiers
from kvreplay.verdict.transfers import transfers
from kvreplay.verdict.verdict import Verdict, judge

_Cause = TypeVar("_Cause", Stall, Crash)
_RAISING: Final = [name for name, row in catalogue().items() if row.verb == "step-raises"]
_AT_START: Final = [
    name for name, row in catalogue().items() if row.verb == "startup" or row.target == BOOTSTRAP_REGISTER
]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedFault:
    """One fault of the plan. `fired` is how often it acted; None: as many moments as the trace shows."""

    spec: str
    """As in the `cause` of its `fault.injected` rows."""
    name: str = ""
    fired: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What the trace cannot say about its run."""

    fingerprint: str
    in_effect: InEffect
    roles: Mapping[str, str]
    """Instance → role, in the order in which the report lists them."""
    faults: Sequence[PlannedFault] = ()
    block_bytes: int = 0
    """Of a block of the model, over all ranks of an engine."""
    path_timers_ns: int = 0
    """Sum of the timers on a parked request's path: what it may wait at most if all of them run out."""


def summarise(frame: pl.DataFrame, facts: RunFacts, findings: Sequence[Finding] = ()) -> Summary:
    """Sum up `frame`, the run-level rows of a trace in order.

    `findings` come on top of the `violation` rows that the frame has: pass what is not in the trace.
    `wall_seconds` is None, and nothing else depends on when or where this runs.
    """
    virtual_ns = int(frame["time_ns"][-1]) if frame.height else 0
    overdue_after_ns = nanoseconds(facts.in_effect.overdue_after_s)
    found = outcomes(frame, facts.path_timers_ns + overdue_after_ns)
    faults = _fault_rows(frame)
    deaths = _deaths(frame, faults, found.requests)
    crashes = [_crash(row) for row in deaths.iter_rows(named=True)]
    became = _faults(faults, found, facts.faults, deaths, _failures_blamed(frame))
    fault_counts = [fault.counted for fault in became]
    explained = {name for fault in became for name in fault.request_ids}
    requests = count_requests(found, unfaulted_failures(frame)["request_id"], explained)
    judged = _judge(frame, facts, found.stalls, crashes, requests, faults, findings, fault_counts)
    usage = counts.usage_samples(frame)
    arrived = found.requests["arrived_ns"]
    arrivals_ns = (int(arrived[0]), int(arrived[-1])) if len(arrived) else (0, 0)
    instances = counts.instances(frame, usage, facts.roles, virtual_ns, arrivals_ns)
    return Summary(
        verdict=judged.verdict.word,
        exit_status=judged.verdict.status,
        reason=judged.verdict.reason,
        fingerprint=facts.fingerprint,
        seed=facts.in_effect.seed,
        profile=facts.in_effect.profile,
        virtual_seconds=virtual_ns / NS_PER_S,
        wall_seconds=None,
        requests=requests,
        reasons=count_reasons(found.requests),
        stalled=judged.stalls,
        overdue=found.overdue,
        circular_waits=circular_waits(frame, overdue_after_ns),
        recomputed_tokens=counts.recomputed(frame),
        computed_tokens=sum(instance.computed_tokens for instance in instances),
        loaded_tokens=sum(instance.loaded_tokens for instance in instances),
        loads=counts.loads(frame),
        transfers=transfers(frame, facts.block_bytes),
        tiers=tiers(frame, usage),
        speculative=counts.speculative(frame, usage),
        evicted_blocks=counts.evicted(frame),
        violations=judged.violations,
        faults=fault_counts,
        crashes=judged.crashes,
        latency_s=latency(found.requests),
        instances=instances,
        series=counts.series(usage, facts.roles),
        in_effect=facts.in_effect,
    )


class _Judged(NamedTuple):
    verdict: Verdict
    stalls: list[Stall]
    crashes: list[Crash]
    violations: list[Violation]


def _judge(
    frame: pl.DataFrame,
    facts: RunFacts,
    stalls: Sequence[Stall],
    crashes: Sequence[Crash],
    requests: Requests,
    faults: pl.DataFrame,
    findings: Sequence[Finding],
    fault_counts: Sequence[FaultCount],
) -> _Judged:
    """Attach what is implied to what implies it, and weigh the rest."""
    attached = attach(
        [*recorded_findings(frame), *findings],
        [StallKey(stall.request_id, stall.instance) for stall in stalls],
        [crash.instance for crash in crashes],
    )
    own_stalls = [_with_implied(stall, attached.by_stall.get(place)) for place, stall in enumerate(stalls)]
    own_crashes = [_with_implied(crash, attached.by_crash.get(place)) for place, crash in enumerate(crashes)]
    violations = _violations(attached, faults)
    unfired = [fault.spec for fault in fault_counts if not fault.fired]
    too_late = [fault.spec for fault in fault_counts if fault.fired and not fault.has_tested]
    verdict = judge(requests, own_stalls, own_crashes, violations, facts.in_effect.fail_on, unfired, too_late)
    return _Judged(verdict, own_stalls, own_crashes, violations)


def _fault_rows(frame: pl.DataFrame) -> pl.DataFrame:
    columns = ("seq", "time_ns", "instance", "peer", "request_id", "status", "cause")
    return rows_of(frame, ["fault.injected"], *columns).collect()


def _deaths(frame: pl.DataFrame, faults: pl.DataFrame, requests: pl.DataFrame) -> pl.DataFrame:
    """The rows of crashes, and the `fault` behind each."""
    rows = rows_of(frame, ["engine.crashed"], "instance", "time_ns", "step", "status", "cause").collect()
    places = requests.select("request_id", "serving", "producer")
    acted = faults.join(places, on="request_id", how="left", maintain_order="left")
    behind = []
    last_death: dict[str | None, int] = {}
    for instance, time_ns, step in rows.select("instance", "time_ns", "step").rows():
        likely = _RAISING if step is None or step >= 0 else _AT_START
        behind.append(_fault_behind(acted, instance, likely, last_death.get(instance, -1), time_ns))
        last_death[instance] = time_ns
    return rows.with_columns(fault=pl.Series(behind, dtype=pl.String))


def _crash(row: Mapping[str, Any]) -> Crash:
    return Crash(
        instance=row["instance"],
        time_s=row["time_ns"] / NS_PER_S,
        step=row["step"],
        exception=row["status"] or "",
        message=row["cause"] or "",
        fault=row["fault"],
    )


def _fault_behind(
    acted: pl.DataFrame, instance: str | None, likely: Sequence[str], after_ns: int, until_ns: int
) -> str | None:
    """The last one there before a death, but those that are likely to kill, since the last death, come before others:
    whatever has a step raise, or, before the first step, keeps an instance from coming up."""
    is_there = pl.any_horizontal(pl.col("instance", "peer", "serving", "producer") == instance)
    rows = acted.filter(is_there, pl.col("time_ns") <= until_ns)
    likely_rows = rows.filter(pl.col("status").is_in(likely), pl.col("time_ns") > after_ns)
    chosen = rows if likely_rows.is_empty() else likely_rows
    return None if chosen.is_empty() else chosen["cause"][-1] or chosen["status"][-1]


def _violations(attached: Attached, faults: pl.DataFrame) -> list[Violation]:
    fault_of = dict(faults.select("seq", "cause").rows())
    return [
        Violation(
            checker=finding.checker,
            time_s=finding.time_ns / NS_PER_S,
            instance=finding.instance,
            request_id=finding.request_id,
            block_id=finding.block_id,
            group=finding.group,
            transfer_id=finding.transfer_id,
            detail=finding.detail,
            fault=fault_of.get(finding.cause_seq),
            implied=_by_name(attached.by_finding.get(place)),
        )
        for place, finding in enumerate(attached.independent)
    ]


def _with_implied(record: _Cause, implied: Counter[str] | None) -> _Cause:
    return msgspec.structs.replace(record, implied=_by_name(implied))


def _by_name(implied: Counter[str] | None) -> dict[str, int]:
    return dict(sorted((implied or {}).items()))


def _failures_blamed(frame: pl.DataFrame) -> dict[int, list[str]]:
    """The fault that a failure which none has named is put down to, by `seq` → the requests."""
    blamed: dict[int, list[str]] = {}
    for finding in recorded_findings(frame):
        if finding.checker == NO_FATAL and finding.cause_seq is not None and finding.request_id is not None:
            blamed.setdefault(finding.cause_seq, []).append(finding.request_id)
    return blamed


class _Became(NamedTuple):
    counted: FaultCount
    request_ids: list[str]
    """Those that it named and those that followed."""


def _faults(
    rows: pl.DataFrame,
    found: Outcomes,
    planned: Sequence[PlannedFault],
    deaths: pl.DataFrame,
    blamed: Mapping[int, Sequence[str]],
) -> list[_Became]:
    """In the order of the plan; what only the trace knows comes last."""
    named = rows.with_columns(pl.col("cause").fill_null(pl.col("status")))
    seen = named["cause"].unique(maintain_order=True)
    known = {fault.spec for fault in planned}
    plan = [*planned, *(PlannedFault(spec=spec) for spec in seen if spec not in known)]
    all_named = rows["request_id"].drop_nulls().unique(maintain_order=True)
    return [
        _fault(
            fault,
            named.filter(pl.col("cause") == fault.spec),
            deaths.filter(pl.col("fault") == fault.spec),
            found,
            all_named,
            blamed,
        )
        for fault in plan
    ]


def _fault(
    fault: PlannedFault,
    rows: pl.DataFrame,
    deaths: pl.DataFrame,
    found: Outcomes,
    all_named: pl.Series,
    blamed: Mapping[int, Sequence[str]],
) -> _Became:
    requests = found.requests
    # A fault may meet the pulls that another makes up.
    real = rows.filter(pl.col("request_id").is_in(requests["request_id"].implode()))
    names = real["request_id"].unique(maintain_order=True).to_list()
    moments = _num_moments(rows)
    held_up = [stall.request_id for stall in found.stalls if stall.fault == fault.spec]
    acted = pl.concat([part.select("instance", "time_ns") for part in (rows.filter(is_of_whole_instance()), deaths)])
    harmed = [name for seq in rows["seq"] for name in blamed.get(seq, ())]
    followed = followers(requests, acted, all_named, [*held_up, *harmed])
    actions = rows.filter(is_action_on_instance())
    late = actions.filter(pl.col("request_id").is_null(), pl.col("time_ns") >= _last_end_ns(requests))
    count = FaultCount(
        spec=fault.spec,
        name=fault.name or (rows["status"][0] if rows.height else ""),
        fired=moments if fault.fired is None else fault.fired,
        requests=len(names),
        outcomes=dict(outcomes_of(requests, names)),
        followed=dict(outcomes_of(requests, followed)),
        fired_late=_num_moments(late),
        acted_on=actions["instance"].drop_nulls().unique(maintain_order=True).to_list(),
    )
    return _Became(count, [*names, *followed])


def _last_end_ns(requests: pl.DataFrame) -> int:
    """When the last request ended; never, if one has not."""
    ends = requests["end_ns"]
    last = FOREVER_NS if ends.null_count() else ends.max()
    assert last is None or isinstance(last, int)
    return last or 0


def _num_moments(rows: pl.DataFrame) -> int:
    return rows.select("time_ns", "instance", "peer").n_unique() if rows.height else 0
