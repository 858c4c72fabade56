"""What the faults cost: a run beside its twin without faults."""

from collections.abc import Iterator

from kvreplay.report.layout import Column, Section, table, title
from kvreplay.report.words import ALWAYS_SHOWN, OUTCOMES, duration, number
from kvreplay.verdict.model import Baseline, Summary


def baseline_section(summary: Summary) -> Section:
    twin = summary.baseline
    if twin is None:
        return
    yield title("Cost of the faults", "beside the same run without them")
    rows = [*_counts(summary, twin), *_latencies(summary, twin)]
    headers = [Column(""), *(Column(name, "right") for name in ("this run", "without faults", "difference"))]
    yield table(headers, rows)


def _counts(summary: Summary, twin: Baseline) -> Iterator[tuple[str, str, str, str]]:
    """Outcomes add up to all requests: those that neither run has are left out, as in the table of requests."""
    outcomes = {name: (getattr(summary.requests, name), getattr(twin.requests, name)) for name in OUTCOMES}
    pairs = {
        **{name: pair for name, pair in outcomes.items() if any(pair) or name in ALWAYS_SHOWN},
        "recomputed tokens": (summary.recomputed_tokens.total, twin.recomputed_tokens.total),
        "computed tokens": (summary.computed_tokens, twin.computed_tokens),
        "loaded tokens": (summary.loaded_tokens, twin.loaded_tokens),
        "evicted blocks": (summary.evicted_blocks.total, twin.evicted_blocks.total),
    }
    for name, (here, there) in pairs.items():
        yield name, number(here), number(there), f"{here - there:+,}" if here != there else "-"


def _latencies(summary: Summary, twin: Baseline) -> Iterator[tuple[str, str, str, str]]:
    here, there = summary.latency_s, twin.latency_s
    lines = {"ttft": (here.ttft, there.ttft), "tpot": (here.tpot, there.tpot), "e2e": (here.e2e, there.e2e)}
    for name, (ours, theirs) in lines.items():
        for point in ("p50", "p99"):
            mine, other = getattr(ours, point), getattr(theirs, point)
            yield f"{name} {point}", duration(mine), duration(other), _difference(mine, other)
    yield (
        "virtual time",
        duration(summary.virtual_seconds),
        duration(twin.virtual_seconds),
        _difference(summary.virtual_seconds, twin.virtual_seconds),
    )


def _difference(here: float | None, there: float | None) -> str:
    if here is None or there is None or here == there:
        return "-"
    sign = "+" if here > there else "-"
    return sign + duration(abs(here - there))
