"""The report for people: the verdict first, then what led to it, then what was in effect."""

from collections.abc import Iterator
from typing import Final

from rich.console import Console
from rich.text import Text

from kvreplay.ids import plural
from kvreplay.report.accounts import evicted_section, instances_section, over_time_section, recomputed_section
from kvreplay.report.baseline import baseline_section
from kvreplay.report.layout import INDENT, Column, Line, Section, print_sections, table, title, verbatim
from kvreplay.report.reproduce import basis, command_lines
from kvreplay.report.tiers import tiers_section
from kvreplay.report.transfers import transfers_section
from kvreplay.report.trouble import crashes_section, stalled_section, violations_section
from kvreplay.report.words import ALWAYS_SHOWN, OUTCOMES, causes, duration, listed, number, share
from kvreplay.verdict.model import FaultCount, InEffect, Percentiles, Summary

_STYLES: Final = {"passed": "bold green", "violated": "bold yellow", "stalled": "bold magenta", "crashed": "bold red"}

MAX_CIRCLES: Final = 3

_LEFT, _RIGHT = Column(""), Column("", "right")


def print_report(summary: Summary, console: Console) -> None:
    """Print the whole report; nothing but `summary` and the console's width decides what it says."""
    sections = (
        _verdict(summary),
        crashes_section(summary),
        _requests(summary),
        stalled_section(summary, console.width),
        violations_section(summary),
        _faults(summary),
        recomputed_section(summary),
        evicted_section(summary),
        transfers_section(summary, console.width),
        tiers_section(summary),
        _speculative(summary),
        _latency(summary),
        baseline_section(summary),
        instances_section(summary),
        over_time_section(summary, console.width, ascii_only=console.options.ascii_only),
        _in_effect(summary),
        _reproduce(summary, console.width),
    )
    print_sections(console, sections)


def _verdict(summary: Summary) -> Section:
    head = Text(summary.verdict.upper(), style=_STYLES.get(summary.verdict, "bold"))
    yield Line(head.append(f"  exit status {summary.exit_status}", style="not bold"))
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
        elif not fault.has_tested:
            yield f"{fault.spec} fired only after every request had ended: it tested nothing"
    yield from _unexplained(summary)
    yield from _circles(summary)
    for instance in summary.instances:
        if instance.overloaded:
            yield f"{instance.id} is overloaded: {instance.overloaded}"


def _circles(summary: Summary) -> Iterator[str]:
    circles = summary.circular_waits
    for wait in circles[:MAX_CIRCLES]:
        span = f"from {duration(wait.since_s)} to {duration(wait.until_s)}"
        yield (
            f"{wait.producer} and {wait.consumer} waited for each other {span}: {wait.producer} kept {wait.kept}, for "
            f"which {wait.consumer} had no room, and {wait.consumer} room for {wait.reserved}, for which "
            f"{wait.producer} had none"
        )
    if len(circles) > MAX_CIRCLES:
        yield f"and {plural(len(circles) - MAX_CIRCLES, 'more such wait')}; --json lists all"


def _unexplained(summary: Summary) -> Iterator[str]:
    """Ends without a full output that no fault explains: the configuration does not fit the trace, for one."""
    requests = summary.requests
    counts = {"rejected": requests.rejected_unfaulted}
    if not any(fault.fired for fault in summary.faults):  # else they are violations
        counts["failed"] = requests.failed_unfaulted
    for outcome, count in counts.items():
        if count:
            reasons = {line.cause: line.count for line in summary.reasons if line.outcome == outcome}
            why = f": {causes(reasons)}" if count == sum(reasons.values()) else ""
            yield f"{plural(count, 'request')} {outcome} without a fault to blame{why}"


def _speculative(summary: Summary) -> Section:
    drafts = summary.speculative
    if drafts is None:
        return
    yield title("Speculative decoding", f"{number(drafts.num_draft_tokens)} tokens drafted")
    rows = []
    if drafts.mean_acceptance_length is not None:
        rows += [
            (
                "accepted",
                f"{number(drafts.num_accepted_tokens)} tokens",
                share(drafts.num_accepted_tokens, drafts.num_draft_tokens),
            ),
            ("acceptance length", f"{drafts.mean_acceptance_length:.2f} tokens", "per verification"),
        ]
    if drafts.recomputed_tokens_per_request is not None:
        each = (
            f"for {plural(drafts.num_recomputed_requests, 'request')}, {drafts.recomputed_tokens_per_request:,.0f} each"
        )
        rows.append(("not transferred", f"{number(drafts.num_recomputed_tokens)} tokens", f"computed again {each}"))
    if rows:
        yield table([_LEFT, _RIGHT, _LEFT], rows)


def _requests(summary: Summary) -> Section:
    requests = summary.requests
    yield title("Requests", number(requests.total))
    counts: dict[str, int] = {name: getattr(requests, name) for name in OUTCOMES}
    notes = {"stalled": _after_healing(summary), "unfinished": "neither ended nor proven stalled"}
    for outcome in ("failed", "aborted", "rejected"):
        notes[outcome] = causes({line.cause: line.count for line in summary.reasons if line.outcome == outcome})
    rows = [
        (name, number(count), share(count, requests.total), notes.get(name, "") if count else "")
        for name, count in counts.items()
        if count or name in ALWAYS_SHOWN
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
            _became(fault),
        )
        for fault in summary.faults
    ]
    headers = [Column("fault", fold=True), Column("fired", "right"), Column("named", "right")]
    yield table([*headers, Column("what became of them", fold=True)], rows)


def _became(fault: FaultCount) -> str:
    parts = [listed(fault.outcomes), f"not named: {listed(fault.followed)} later" if fault.followed else ""]
    became = "; ".join(filter(None, parts)) or "-"
    return f"on {', '.join(fault.acted_on)}: {became}" if fault.acted_on else became


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


def _in_effect(summary: Summary) -> Section:
    effect = summary.in_effect
    if effect is None:
        return
    yield title("In effect")
    yield table([_LEFT, Column("", fold=True), Column("", fold=True)], list(_settings(effect, summary.requests.total)))


def _reproduce(summary: Summary, width: int) -> Section:
    yield title("Reproduce")
    if summary.in_effect is not None:
        for line in command_lines(summary.in_effect, width - INDENT):
            yield verbatim(line, INDENT)
    yield Line(f"fingerprint {summary.fingerprint}", style="dim", indent=INDENT)


def _settings(effect: InEffect, num_requests: int) -> Iterator[tuple[str, str, str]]:
    yield "trace", effect.trace, _taken(effect.limit, num_requests)
    origin = basis(effect.config_origin)
    if origin == "the trace":
        yield "config", "the one in the trace", ""
    else:
        yield "config", effect.config, origin
    yield "profile", effect.profile, basis(effect.profile_origin)
    yield "kv_load_failure_policy", effect.policy, effect.policy_origin
    yield "seed", str(effect.seed), ""
    for setting in effect.settings:
        yield "set", setting, "--set"
    for switch in effect.behaviours:
        yield "behaviour", switch, "--behaviour"
    if effect.plan:
        yield "fault plan", effect.plan, ""


def _taken(limit: int | None, num_requests: int) -> str:
    # The trace has no more than the limit where so many were not reached.
    return "all requests" if limit is None or num_requests < limit else f"the first {plural(limit, 'request')}"
