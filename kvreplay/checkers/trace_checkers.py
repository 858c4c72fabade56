"""All laws that can be checked on a finished trace, and the detail level that each needs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import polars as pl

from kvreplay.checkers import exactly_once, fence, no_fatal, null_block, output_equal, progress, rank_agree
from kvreplay.checkers.finding import EXACTLY_ONCE, FENCE, NO_FATAL, NULL_BLOCK, PROGRESS, RANK_AGREE, Finding
from kvreplay.checkers.output_equal import DigestsOf


class TraceChecker(NamedTuple):
    """A law over a whole trace. `check` takes the trace's frame (all rows of its detail level, in order)."""

    name: str
    detail: int
    """The lowest detail level at which it sees anything."""
    check: Callable[[pl.DataFrame], list[Finding]]


def trace_checkers(*, fences_attempts: bool = False) -> tuple[TraceChecker, ...]:
    """Every law. `fences_attempts`: as `check_fence` has it."""
    return (
        TraceChecker(EXACTLY_ONCE, exactly_once.DETAIL, exactly_once.check_exactly_once),
        TraceChecker(FENCE, fence.DETAIL, partial(fence.check_fence, fences_attempts=fences_attempts)),
        TraceChecker(NO_FATAL, no_fatal.DETAIL, no_fatal.check_no_fatal),
        TraceChecker(NULL_BLOCK, null_block.DETAIL, null_block.check_null_block),
        TraceChecker(PROGRESS, progress.DETAIL, progress.check_progress),
        TraceChecker(RANK_AGREE, rank_agree.DETAIL, rank_agree.check_rank_agree),
    )


def check_trace(
    frame: pl.DataFrame,
    detail: int,
    expected: Mapping[str, int] | DigestsOf | None = None,
    *,
    fences_attempts: bool = False,
) -> list[Finding]:
    """Every law that a trace of this detail level can show broken, in order of time.

    OUTPUT-EQUAL is among them if `expected` says what the outputs should be. What live checkers found is not:
    the trace has it (`recorded_findings`). `fences_attempts`: as `trace_checkers` has it.
    """
    checkers = trace_checkers(fences_attempts=fences_attempts)
    found = [finding for checker in checkers if checker.detail <= detail for finding in checker.check(frame)]
    if expected is not None:
        found += output_equal.check_output_equal(frame, expected)
    return sorted(found, key=lambda finding: finding.time_ns)
