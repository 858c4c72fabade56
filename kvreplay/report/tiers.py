"""The tiers behind the GPU's pool: what they held, moved and saved."""

from typing import Final

from kvreplay.ids import plural
from kvreplay.report.layout import INDENT, Column, Line, Section, table, title
from kvreplay.report.words import duration, listed, number, share, size
from kvreplay.verdict.model import Direction, Summary

_NAMES: Final = {"CPU": "CPU", "STORAGE": "disk"}
_LEFT, _RIGHT = Column(""), Column("", "right")


def tiers_section(summary: Summary) -> Section:
    tiers = summary.tiers
    if tiers is None:
        return
    name = _NAMES[tiers.medium]
    yield title(
        f"{name[0].upper()}{name[1:]} tier",
        f"{number(tiers.peak_cpu_chunks)} of {number(tiers.cpu_chunks)} chunks used",
    )
    hits = tiers.hit_tokens
    rows = [
        (f"hit in {tier}", f"{number(count)} tokens", share(count, sum(hits.values()))) for tier, count in hits.items()
    ]
    rows.append(("recompute saved", f"{number(tiers.saved_tokens)} tokens", ""))
    yield table([_LEFT, _RIGHT, _RIGHT], rows)
    moves = [_move(f"to the {name}", tiers.stored), _move("to the GPU", tiers.loaded)]
    names = ("copied", "in", "started", "finished", "failed")
    yield table([_LEFT, *(Column(name, "right") for name in names)], moves)
    for tier, causes in tiers.evicted_chunks.items():
        yield Line(f"{plural(sum(causes.values()), 'chunk')} evicted from {tier}: {listed(causes)}", indent=INDENT)
    if tiers.flushed_jobs:
        yield Line(f"{plural(tiers.flushed_jobs, 'copy job')} flushed before blocks were given away", indent=INDENT)
    if tiers.refused_offers:
        yield Line(f"{plural(tiers.refused_offers, 'offer')} of chunks refused for want of room", indent=INDENT)


def _move(name: str, direction: Direction) -> tuple[str, ...]:
    counts = (direction.started, direction.finished, direction.failed)
    return name, size(direction.bytes), duration(direction.seconds), *map(number, counts)
