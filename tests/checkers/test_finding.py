"""Finding: into a trace and out of it."""

from collections.abc import Callable

import polars as pl

from kvreplay.checkers.finding import CONTENT, Finding, recorded_findings
from kvreplay.events import Event

FrameOf = Callable[..., pl.DataFrame]


def test_a_finding_survives_its_way_through_a_trace(frame_of: FrameOf) -> None:
    finding = Finding(CONTENT, 7, "read as 3", "D0", "r1", block_id=4, group=0, transfer_id="x1", cause_seq=0)
    fault = Event("fault.injected", 1, request_id="r1", status="corrupt", cause="corrupt:nth=1")
    frame = frame_of(fault, finding.to_event(cause_handle=0))
    assert recorded_findings(frame) == [finding]


def test_a_row_that_names_several_blocks_is_a_finding_for_each(frame_of: FrameOf) -> None:
    frame = frame_of(Event("violation", 5, "D0", block_ids=[3, 9], status=CONTENT, cause="wrong"))
    assert [finding.block_id for finding in recorded_findings(frame)] == [3, 9]


def test_a_finding_without_a_place_stays_one(frame_of: FrameOf) -> None:
    finding = Finding("COUNTERS", 5, "does not add up")
    assert recorded_findings(frame_of(finding.to_event())) == [finding]


def test_what_was_found_later_keeps_its_time(frame_of: FrameOf) -> None:
    finding = Finding(CONTENT, 5, "wrong", "D0", "r1")
    event = finding.to_event(found_ns=9)
    assert event.time_ns == 9
    assert recorded_findings(frame_of(event)) == [finding]
