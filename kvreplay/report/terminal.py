"""The report for people: the verdict first, then what led to it, then what was in effect."""

from collections import Counter
from collections.abc import Iterator
from typing import Final, TypeAlias

from rich.console import Console, RenderableType
from rich.text import Text

from kvreplay.report.baseline import baseline_section
from kvreplay.report.layout import INDENT, WIDE, Column, Line, more, print_sections, table, title
from kvreplay.report.reproduce import command
from kvreplay.report.sparkline import columns, sparkline
from kvreplay.report.words import duration, instant, listed, number, share
from kvreplay.verdict.model import InEffect, Percentiles, Series, Stall, Summary, Violation
from kvreplay.verdict.verdict import plural

MAX_STALLS: Final = 10
MAX_GROUPS: Final = 10
MAX_INSTANCES: Final = 32
MAX_PLOT_WIDTH: Final = 120

_STYLES: Final = {"passed": "bold green", "violated": "bold yellow", "stalled": "bold magenta", "crashed": "bold red"}

Section: TypeAlias = Iterator[RenderableType]

_LEFT, _RIGHT = Column(""), Column("", "right")


def print_report(summary: Summary, console: Console) -> None:
    """Print the whole report; nothing but `summary` and the console's width decides what it says."""
    sections = (
        _verdict(summary),
        _crashes(summary),
        _requests(summary),
        _stalled(summary, console.width),
        _violations(summary),
        _faults(summary),
        _recomputed(summary),
        _evicted(summary),
        _latency(summary),
        baseline_section(summary),
        _instances(summary),
        _over_time(summary, console.width, ascii_only=console.options.ascii_only),
        _in_effect(summary),
        _reproduce(summary),
    )
    print_sections(console, sections)


def _verdict(summary: Summary) -> Section:
    head = Text(summary.verdict.upper(), style=_STYLES.get(summary.verdict, "bold"))
    yield head.append(f"  exit status {summary.exit_status}", style="not bold")
    yield Line(summary.reason)
    for warning in _warnings(summary):
        yield Line(f"! {warning}", style="yellow")
    virtual = f"{duration(summary.virtual_seconds)} of virtual time"
    if summary.wall_seconds:
        factor = summary.virtual_seconds / summary.wall_seconds
        virtual += f" in {duration(summary.wall_seconds)}, {factor:,.0f} times as fast"
    yield Line(virtual, style="dim")


def _warnings(summary: Summary) -> Iterator[str]:
    """What a reader must know before trusting the rest."""
    for fault in summary.faults:
        if not fault.fired:
            yield f"{fault.spec} never fired: it tested nothing"
    for instance in summary.instances:
        if instance.overloaded:
            yield f"{instance.id} is overloaded: {instance.overloaded}"


def _crashes(summary: Summary) -> Section:
    if not summary.crashes:
        return
    yield title("Crashes", plural(len(summary.crashes), "engine"))
    rows = [
        (
            crash.instance or "-",
            instant(crash.time_s),
            "-" if crash.step is None else number(crash.step),
            f"{crash.exception}: {crash.message}" if crash.message else crash.exception,
        )
        for crash in summary.crashes[:MAX_GROUPS]
    ]
    headers = [Column("instance"), Column("at", "right"), Column("step", "right"), Column("exception", fold=True)]
    yield table(headers, rows)
    if len(summary.crashes) > MAX_GROUPS:
        yield more(len(summary.crashes) - MAX_GROUPS, "crashes")


def _requests(summary: Summary) -> Section:
    requests = summary.requests
    yield title("Requests", number(requests.total))
    counts = {
        "finished": requests.finished,
        "failed": requests.failed,
        "aborted": requests.aborted,
        "rejected": requests.rejected,
        "stalled": requests.stalled,
        "unfinished": requests.unfinished,
    }
    notes = {"stalled": _after_healing(summary), "unfinished": "neither ended nor proven stalled"}
    for reason in summary.reasons:
        note = f"{number(reason.count)} {reason.cause or 'without a cause'}"
        notes[reason.outcome] = f"{notes[reason.outcome]}; {note}" if reason.outcome in notes else note
    always = ("finished", "failed", "stalled")
    rows = [
        (name, number(count), share(count, requests.total), notes.get(name, "") if count else "")
        for name, count in counts.items()
        if count or name in always
    ]
    if requests.overdue:
        rows.append(("overdue", number(requests.overdue), share(requests.overdue, requests.total), "ended late"))
    yield table([_LEFT, _RIGHT, _RIGHT, Column("", fold=True)], rows)


def _after_healing(summary: Summary) -> str:
    requests = summary.requests
    parts = {
        "lost for good": requests.lost,
        "ended once the faults were gone": requests.held_up,
    }
    return listed({name: count for name, count in parts.items() if count})


def _stalled(summary: Summary, width: int) -> Section:
    if not summary.stalled:
        return
    stalls = summary.stalled
    blocks = sum(stall.blocks_held for stall in stalls)
    held = f"{plural(blocks, 'block')} held, {number(sum(stall.block_seconds for stall in stalls))} block-seconds"
    yield title("Stalled", f"{number(len(stalls))}, {held}")
    yield _stall_groups(stalls)
    yield Line("")
    yield _stall_table(stalls[:MAX_STALLS], is_wide=width >= WIDE)
    if len(stalls) > MAX_STALLS:
        yield more(len(stalls) - MAX_STALLS, "stalled requests")


def _stall_groups(stalls: list[Stall]) -> RenderableType:
    """On what they wait, and on whom."""
    groups: dict[tuple[str, str], list[Stall]] = {}
    for stall in stalls:
        groups.setdefault((stall.waiting_on or "-", stall.peer or "-"), []).append(stall)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [_stall_group(*key, members) for key, members in ordered[:MAX_GROUPS]]
    if len(ordered) > MAX_GROUPS:
        rows.append(_stall_group("others", "", [stall for _, members in ordered[MAX_GROUPS:] for stall in members]))
    headers = [Column("waiting on", fold=True), Column("peer", fold=True), Column("on", fold=True)]
    return table([*headers, Column("stalled", "right"), Column("blocks", "right")], rows)


def _stall_group(waiting_on: str, peer: str, members: list[Stall]) -> tuple[str, ...]:
    instances = list(dict.fromkeys(stall.instance or "-" for stall in members))
    where = instances[0] if len(instances) == 1 else plural(len(instances), "instance")
    return (waiting_on, peer, where, number(len(members)), number(sum(stall.blocks_held for stall in members)))


def _stall_table(stalls: list[Stall], *, is_wide: bool) -> RenderableType:
    any_healed = any(stall.ended for stall in stalls)
    headers = [Column("request", fold=True), Column("instance", fold=True), Column("status")]
    headers += [Column("since", "right"), Column("blocks", "right")]
    if any_healed:
        headers.append(Column("healed"))
    if is_wide:
        headers += [Column("block-s", "right"), Column("peer", fold=True), Column("fault", fold=True)]
    rows = [
        (
            stall.request_id,
            stall.instance or "-",
            stall.status,
            instant(stall.since_s),
            number(stall.blocks_held),
            *((stall.ended or "lost",) if any_healed else ()),
            *((number(stall.block_seconds), stall.peer or "-", stall.fault or "-") if is_wide else ()),
        )
        for stall in stalls
    ]
    return table(headers, rows)


def _violations(summary: Summary) -> Section:
    yield title("Violations", number(len(summary.violations)) if summary.violations else "none")
    groups: dict[tuple[str, str | None], list[Violation]] = {}
    for violation in summary.violations:
        groups.setdefault((violation.checker, violation.fault), []).append(violation)
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    rows = [
        (checker, number(len(members)), fault or "-", f"{_place(members[0])}: {members[0].detail}")
        for (checker, fault), members in ordered[:MAX_GROUPS]
    ]
    if rows:
        headers = [Column("checker"), Column("count", "right"), Column("fault", fold=True), Column("first", fold=True)]
        yield table(headers, rows)
    if len(ordered) > MAX_GROUPS:
        yield more(len(ordered) - MAX_GROUPS, "kinds of violation")
    implied = _implied(summary)
    if implied:
        yield Line(f"not counted, because they follow from what is reported: {listed(implied)}", "dim", INDENT)


def _place(violation: Violation) -> str:
    parts = [
        instant(violation.time_s),
        violation.instance,
        violation.request_id,
        None if violation.block_id is None else f"block {violation.block_id}",
        None if violation.group is None else f"group {violation.group}",
        violation.transfer_id,
    ]
    return ", ".join(part for part in parts if part)


def _implied(summary: Summary) -> dict[str, int]:
    total: Counter[str] = Counter()
    for implied in (
        *(stall.implied for stall in summary.stalled),
        *(crash.implied for crash in summary.crashes),
        *(violation.implied for violation in summary.violations),
    ):
        total.update(implied)
    return dict(total)


def _faults(summary: Summary) -> Section:
    if not summary.faults:
        return
    num_unfired = sum(not fault.fired for fault in summary.faults)
    yield title("Faults", f"{num_unfired} of {len(summary.faults)} never fired" if num_unfired else "")
    rows = [
        (
            fault.spec,
            number(fault.fired) if fault.fired else "never",
            number(fault.requests),
            listed(fault.outcomes) or "-",
        )
        for fault in summary.faults
    ]
    headers = [Column("fault", fold=True), Column("fired", "right"), Column("requests", "right")]
    yield table([*headers, Column("what became of them", fold=True)], rows)


def _recomputed(summary: Summary) -> Section:
    tokens, computed = summary.recomputed_tokens, summary.computed_tokens
    yield title("Recomputed tokens", f"{number(tokens.total)}, {share(tokens.total, computed)} of all computed")
    rows = [(cause, number(count), share(count, tokens.total)) for cause, count in _by_size(tokens.by_cause)]
    rows.append(("(all computed)", number(computed), ""))
    if summary.loaded_tokens or summary.loads.started:
        rows.append(("(all loaded)", number(summary.loaded_tokens), ""))
    yield table([_LEFT, _RIGHT, _RIGHT], rows)
    loads = summary.loads
    if loads.failed:
        causes = listed({cause or "without a cause": count for cause, count in loads.failed_by_cause.items()})
        yield Line(f"{number(loads.failed)} of {plural(loads.started, 'load')} failed: {causes}", indent=INDENT)


def _evicted(summary: Summary) -> Section:
    evicted = summary.evicted_blocks
    yield title("Evicted blocks", number(evicted.total))
    rows = [
        (cause, f"group {group}", number(count))
        for group, causes in evicted.by_group_and_cause.items()
        for cause, count in _by_size(causes)
    ]
    if rows:
        yield table([_LEFT, _LEFT, _RIGHT], rows)


def _by_size(counts: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def _latency(summary: Summary) -> Section:
    yield title("Latency")
    latency = summary.latency_s
    lines: dict[str, Percentiles] = {
        "time to first token": latency.ttft,
        "time per output token": latency.tpot,
        "end to end": latency.e2e,
    }
    rows = [
        (name, duration(line.p50), duration(line.p90), duration(line.p99), number(line.count))
        for name, line in lines.items()
    ]
    names = ("p50", "p90", "p99", "requests")
    yield table([_LEFT, *(Column(name, "right") for name in names)], rows)


def _instances(summary: Summary) -> Section:
    if not summary.instances:
        return
    yield title("Instances")
    rows = [
        (
            instance.id,
            instance.role,
            f"{instance.utilisation:.1%}".replace("%", " %"),
            number(instance.steps),
            f"{number(instance.peak_blocks)} of {number(instance.num_gpu_blocks)}",
            number(instance.preemptions),
        )
        for instance in summary.instances[:MAX_INSTANCES]
    ]
    names = ("busy", "steps", "most blocks", "preempted")
    headers = [Column("instance", fold=True), Column("role"), *(Column(name, "right") for name in names)]
    yield table(headers, rows)
    if len(summary.instances) > MAX_INSTANCES:
        yield more(len(summary.instances) - MAX_INSTANCES, "instances")


def _over_time(summary: Summary, width: int, *, ascii_only: bool) -> Section:
    if not summary.series:
        return
    end = max(line.time_s[-1] for line in summary.series)
    yield title("Over time", f"0 to {duration(end)}")
    lines = [(line, *gauge) for line in summary.series for gauge in _gauges(line)]
    roles = max(len(line.role) for line in summary.series)
    labels = [f"{line.role:{roles}}  {name}" for line, name, _, _ in lines]
    tops = [f"most {number(max(values))}" + (f" of {number(top)}" if top else "") for _, _, values, top in lines]
    taken = INDENT + max(map(len, labels)) + len("  ||  ") + max(map(len, tops))
    room = max(10, min(width, MAX_PLOT_WIDTH) - taken)
    for (line, _, values, top), label, most in zip(lines, labels, tops, strict=True):
        drawn = sparkline(columns(line.time_s, values, end, room), top or max(values), ascii_only=ascii_only)
        yield Line(f"{label:{max(map(len, labels))}}  |{drawn}|  {most}", indent=INDENT)


def _gauges(line: Series) -> Iterator[tuple[str, list[int], int]]:
    yield "blocks", line.blocks, line.capacity_blocks
    yield "running", line.running, 0
    if max(line.queued):
        yield "queued", line.queued, 0
    yield "deferred", line.deferred, 0


def _in_effect(summary: Summary) -> Section:
    effect = summary.in_effect
    if effect is None:
        return
    yield title("In effect")
    yield table([_LEFT, Column("", fold=True), Column("", fold=True)], list(_settings(effect)))


def _reproduce(summary: Summary) -> Section:
    yield title("Reproduce")
    if summary.in_effect is not None:
        yield Line(command(summary.in_effect), indent=INDENT)
    yield Line(f"fingerprint {summary.fingerprint}", style="dim", indent=INDENT)


def _settings(effect: InEffect) -> Iterator[tuple[str, str, str]]:
    yield "trace", effect.trace, "all requests" if effect.limit is None else f"the first {effect.limit:,} requests"
    yield "config", effect.config, effect.config_origin
    yield "profile", effect.profile, effect.profile_origin
    yield "kv_load_failure_policy", effect.policy, effect.policy_origin
    yield "seed", str(effect.seed), ""
    for setting in effect.settings:
        yield "set", setting, "--set"
    for switch in effect.behaviours:
        yield "behaviour", switch, "--behaviour"
    if effect.plan:
        yield "fault plan", effect.plan, ""
