"""What it cost and how busy the instances were: tokens, blocks, utilisation, use over time."""

from collections.abc import Iterator
from typing import Final

from kvreplay.ids import plural
from kvreplay.report.layout import INDENT, Column, Line, Section, more, table, title, verbatim
from kvreplay.report.sparkline import columns, sparkline
from kvreplay.report.words import by_size, causes, duration, number, percent, share
from kvreplay.verdict.model import Series, Summary

MAX_INSTANCES: Final = 32
MAX_PLOT_WIDTH: Final = 120
_MIN_PLOT_WIDTH: Final = 10

_LEFT, _RIGHT = Column(""), Column("", "right")


def recomputed_section(summary: Summary) -> Section:
    tokens, computed = summary.recomputed_tokens, summary.computed_tokens
    yield title("Recomputed tokens", f"{number(tokens.total)}, {share(tokens.total, computed)} of all computed")
    rows = [(cause, number(count), share(count, tokens.total)) for cause, count in by_size(tokens.by_cause)]
    rows.append(("(all computed)", number(computed), ""))
    if summary.loaded_tokens or summary.loads.started:
        rows.append(("(all loaded)", number(summary.loaded_tokens), ""))
    yield table([_LEFT, _RIGHT, _RIGHT], rows)
    loads = summary.loads
    if loads.failed:
        why = causes(loads.failed_by_cause) or "without a cause"
        yield Line(f"{number(loads.failed)} of {plural(loads.started, 'load')} failed: {why}", indent=INDENT)


def evicted_section(summary: Summary) -> Section:
    evicted = summary.evicted_blocks
    yield title("Evicted blocks", number(evicted.total))
    rows = [
        (cause, f"group {group}", number(count))
        for group, causes in evicted.by_group_and_cause.items()
        for cause, count in by_size(causes)
    ]
    if rows:
        yield table([_LEFT, _LEFT, _RIGHT], rows)


def instances_section(summary: Summary) -> Section:
    if not summary.instances:
        return
    yield title("Instances")
    rows = [
        (
            instance.id,
            instance.role,
            percent(instance.utilisation if instance.busy is None else instance.busy),
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


def over_time_section(summary: Summary, width: int, *, ascii_only: bool) -> Section:
    lines = [(line, *gauge) for line in summary.series for gauge in _gauges(line)]
    if not lines:
        return
    end = max(line.time_s[-1] for line in summary.series)
    num_points = max(len(line.time_s) for line in summary.series)
    yield title("Over time", f"{plural(num_points, 'point')} from 0 to {duration(end)}, summed per role")
    roles = max(len(line.role) for line in summary.series)
    labels = [f"{line.role:{roles}}  {name}" for line, name, _, _ in lines]
    tops = [f"most {number(max(values))}" + (f" of {number(top)}" if top else "") for _, _, values, top in lines]
    label_width = max(map(len, labels))
    room = min(width, MAX_PLOT_WIDTH) - INDENT - label_width - len("  ||")
    beside = room - len("  ") - max(map(len, tops))
    for (line, _, values, top), label, most in zip(lines, labels, tops, strict=True):
        plotted = columns(line.time_s, values, end, max(beside if beside >= _MIN_PLOT_WIDTH else room, 1))
        drawn = f"{label:{label_width}}  |{sparkline(plotted, top or max(values), ascii_only=ascii_only)}|"
        if beside >= _MIN_PLOT_WIDTH:
            yield verbatim(f"{drawn}  {most}", INDENT)
        else:
            yield verbatim(drawn, INDENT)
            yield Line(most, indent=2 * INDENT)


def _gauges(line: Series) -> Iterator[tuple[str, list[int], int]]:
    """Name, values and what they are measured against; what was 0 in every sample is left out."""
    gauges = (
        ("blocks", line.blocks, line.capacity_blocks),
        ("running", line.running, 0),
        ("queued", line.queued, 0),
        ("deferred", line.deferred, 0),
    )
    return (gauge for gauge in gauges if max(gauge[1]))
