"""What went wrong: crashes, stalls and violations."""

from collections import Counter
from typing import Final

from rich.console import RenderableType

from kvreplay.ids import plural
from kvreplay.report.layout import INDENT, WIDE, Column, Line, Section, more, table, title
from kvreplay.report.words import instant, listed, number
from kvreplay.verdict.model import Stall, Summary, Violation

MAX_STALLS: Final = 10
MAX_GROUPS: Final = 10


def crashes_section(summary: Summary) -> Section:
    if not summary.crashes:
        return
    yield title("Crashes", plural(len({crash.instance for crash in summary.crashes}), "engine"))
    rows = [
        (
            crash.instance or "-",
            instant(crash.time_s),
            "-" if crash.step is None else number(crash.step),
            f"{crash.exception}: {crash.message}" if crash.message else crash.exception,
            crash.fault or "-",
        )
        for crash in summary.crashes[:MAX_GROUPS]
    ]
    headers = [
        Column("instance"),
        Column("at", "right"),
        Column("step", "right"),
        Column("exception", fold=True),
        Column("fault", fold=True),
    ]
    yield table(headers, rows)
    if len(summary.crashes) > MAX_GROUPS:
        yield more(len(summary.crashes) - MAX_GROUPS, "crashes")


def stalled_section(summary: Summary, width: int) -> Section:
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


def violations_section(summary: Summary) -> Section:
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
        yield Line(
            f"not counted, because they follow from what is reported: {listed(implied)}",
            "dim",
            INDENT,
        )


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
