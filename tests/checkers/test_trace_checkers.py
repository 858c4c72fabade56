"""The laws over a trace: for each a sound example and broken ones."""

from collections.abc import Callable, Sequence

import numpy as np
import polars as pl
import pytest
from numpy.typing import NDArray

from kvreplay.checkers.exactly_once import check_exactly_once
from kvreplay.checkers.fence import check_fence
from kvreplay.checkers.finding import Finding
from kvreplay.checkers.no_fatal import check_no_fatal
from kvreplay.checkers.null_block import check_null_block
from kvreplay.checkers.output_equal import check_output_equal
from kvreplay.checkers.progress import check_progress
from kvreplay.checkers.rank_agree import check_rank_agree
from kvreplay.checkers.trace_checkers import check_trace, trace_checkers
from kvreplay.connectors.mooncake.producer import NOT_READY
from kvreplay.events import DETAIL_BLOCKS, DETAIL_RUN, Event

FrameOf = Callable[..., pl.DataFrame]


def arrived(request_id: str, time_ns: int = 0) -> Event:
    return Event("request.arrived", time_ns, request_id=request_id, prompt_tokens=32, output_tokens=4)


def routed(request_id: str, time_ns: int = 0) -> Event:
    return Event("request.routed", time_ns, "D0", request_id=request_id, peer="P0", transfer_id=f"x-{request_id}")


def finished(request_id: str, instance: str, time_ns: int, digest: int = 0, num_tokens: int = 4) -> Event:
    return Event(
        "request.finished",
        time_ns,
        instance,
        request_id=request_id,
        num_tokens=num_tokens,
        status="length",
        output_hash=digest,
    )


def failed(request_id: str, time_ns: int) -> Event:
    return Event("request.failed", time_ns, "D0", request_id=request_id, num_tokens=0, cause="load failed")


def stalled(request_id: str, time_ns: int) -> Event:
    return Event("request.stalled", time_ns, "D0", request_id=request_id, num_tokens=0, num_blocks=2, cause="a reply")


def fault(request_id: str | None, time_ns: int, instance: str | None = "D0", name: str = "timeout") -> Event:
    return Event("fault.injected", time_ns, instance, request_id=request_id, status=name, cause=name)


def pair(request_id: str) -> list[Event]:
    """A request that both its legs finish."""
    legs = [finished(request_id, "P0", 2, digest=1, num_tokens=1), finished(request_id, "D0", 5, digest=9)]
    return [arrived(request_id), routed(request_id), *legs]


def said(findings: Sequence[Finding]) -> list[tuple[str | None, str | None, str]]:
    return [(finding.instance, finding.request_id, finding.detail) for finding in findings]


# -- EXACTLY-ONCE ---------------------------------------------------------------------------------------------


def test_each_leg_may_end_once(frame_of: FrameOf) -> None:
    assert not check_exactly_once(frame_of(*pair("r1")))


@pytest.mark.parametrize("late", ["request.finished", "request.failed", "request.promoted", "tokens.recomputed"])
def test_nothing_happens_to_a_request_after_its_end(frame_of: FrameOf, late: str) -> None:
    frame = frame_of(*pair("r1"), Event(late, 7, "D0", request_id="r1", num_tokens=1))
    assert said(check_exactly_once(frame)) == [("D0", "r1", f"{late} after request.finished")]


def test_late_signals_of_its_transfer_are_no_breach(frame_of: FrameOf) -> None:
    late = Event("load.finished", 7, "D0", request_id="r1", num_tokens=16)
    assert not check_exactly_once(frame_of(*pair("r1"), late))


def test_asking_twice_to_abort_is_no_breach(frame_of: FrameOf) -> None:
    ask = Event("request.aborted", 1, request_id="r1")
    assert not check_exactly_once(frame_of(arrived("r1"), ask, ask))


def blocks(kind: str, time_ns: int, request_id: str, block_ids: list[int], instance: str = "D0") -> Event:
    return Event(f"block.{kind}", time_ns, instance, request_id=request_id, group=0, block_ids=block_ids)


def test_a_request_may_give_a_block_back_once_per_life(frame_of: FrameOf) -> None:
    """After a preemption it finds its old block by a prefix hit, which no row says."""
    frame = frame_of(
        blocks("allocated", 1, "r1", [1, 2]),
        blocks("freed", 2, "r1", [2, 1]),
        blocks("allocated", 3, "r1", [5]),
        blocks("freed", 4, "r1", [5, 1, 0, 0]),
    )
    assert not check_exactly_once(frame)


def test_a_block_given_back_twice_is_found(frame_of: FrameOf) -> None:
    frame = frame_of(
        blocks("allocated", 1, "r1", [1, 2]), blocks("freed", 2, "r1", [2, 1]), blocks("freed", 3, "r1", [2])
    )
    assert [(finding.time_ns, finding.block_id) for finding in check_exactly_once(frame)] == [(3, 2)]


# -- OUTPUT-EQUAL ---------------------------------------------------------------------------------------------


def test_a_mapping_is_held_against_what_the_client_gets(frame_of: FrameOf) -> None:
    frame = frame_of(*pair("r1"), *pair("r2"))
    assert not check_output_equal(frame, {"r1": 9})
    assert [finding.request_id for finding in check_output_equal(frame, {"r1": 9, "r2": 8})] == ["r2"]


def test_a_function_is_asked_for_every_leg(frame_of: FrameOf) -> None:
    def expected(request_ids: Sequence[str], num_tokens: NDArray[np.int64]) -> NDArray[np.uint64]:
        assert list(request_ids) == ["r1", "r1"]
        return np.where(num_tokens == 1, 2, 9).astype(np.uint64)

    [finding] = check_output_equal(frame_of(*pair("r1")), expected)
    assert (finding.instance, finding.time_ns) == ("P0", 2)


def test_digests_use_all_64_bits(frame_of: FrameOf) -> None:
    top = (1 << 64) - 1
    frame = frame_of(arrived("r1"), routed("r1"), finished("r1", "D0", 3, digest=top))
    assert not check_output_equal(frame, {"r1": top})
    assert check_output_equal(frame, {"r1": top - 1})


# -- NO-FATAL -------------------------------------------------------------------------------------------------


def test_a_faulted_request_may_fail(frame_of: FrameOf) -> None:
    frame = frame_of(*pair("r1"), arrived("r2"), routed("r2"), fault("r2", 3), failed("r2", 4))
    assert not check_no_fatal(frame)


def test_a_bystander_may_not(frame_of: FrameOf) -> None:
    frame = frame_of(arrived("r1"), routed("r1"), fault("r2", 3), failed("r1", 4))
    assert said(check_no_fatal(frame)) == [("D0", "r1", "failed though no fault named it: load failed")]


@pytest.mark.parametrize("acted_on", ["D0", "P0", None])
def test_a_fault_on_a_whole_instance_excuses_what_it_served_or_fed(frame_of: FrameOf, acted_on: str | None) -> None:
    frame = frame_of(arrived("r1"), routed("r1"), fault(None, 3, acted_on), failed("r1", 4))
    assert not check_no_fatal(frame)


def test_a_crash_excuses_who_comes_later_too_whomever_it_names(frame_of: FrameOf) -> None:
    frame = frame_of(arrived("r1"), routed("r1"), fault("r2", 3, "D0", "peer-crash"), failed("r1", 4))
    assert not check_no_fatal(frame)


def test_without_faults_a_failure_is_no_fault_s_doing(frame_of: FrameOf) -> None:
    assert not check_no_fatal(frame_of(arrived("r1"), routed("r1"), failed("r1", 4)))


def test_a_dead_engine_is_found(frame_of: FrameOf) -> None:
    crash = Event("engine.crashed", 4, "D0", 17, status="AssertionError", cause="block 3")
    frame = frame_of(arrived("r1"), routed("r1"), fault("r2", 3), crash, failed("r1", 5))
    assert said(check_no_fatal(frame)) == [("D0", None, "the engine died: AssertionError")]


# -- PROGRESS -------------------------------------------------------------------------------------------------


def test_requests_that_end_make_progress(frame_of: FrameOf) -> None:
    assert not check_progress(frame_of(*pair("r1"), arrived("r2"), Event("request.rejected", 1, request_id="r2")))


def test_stalls_are_one_finding_per_instance(frame_of: FrameOf) -> None:
    frame = frame_of(arrived("r1"), routed("r1"), arrived("r2"), routed("r2"), stalled("r1", 9), stalled("r2", 9))
    assert said(check_progress(frame)) == [("D0", None, "2 unfinished and nothing open that could end them")]


def test_a_request_that_just_disappears_is_found(frame_of: FrameOf) -> None:
    frame = frame_of(arrived("r1"), routed("r1"), finished("r1", "P0", 2))
    assert said(check_progress(frame)) == [("D0", "r1", "never ended, and not proven stalled")]


@pytest.mark.parametrize("died", ["D0", "P0"])
def test_the_end_of_its_engine_explains_it(frame_of: FrameOf, died: str) -> None:
    frame = frame_of(arrived("r1"), routed("r1"), Event("engine.crashed", 4, died, 17, status="AssertionError"))
    assert not check_progress(frame)


def test_pulls_that_a_producer_has_given_up_are_told_in_order_of_time(frame_of: FrameOf) -> None:
    names = [f"r{number}" for number in range(300)]
    frame = frame_of(
        *(event for name in names for event in (arrived(name), routed(name))),
        *(Event("pull.sent", 1, "D0", request_id=name, peer="P0") for name in names),
        *(Event("request.aborted", 2, "P0", request_id=name, cause="client") for name in names),
        *(Event("pull.settled", 3, "D0", request_id=name, peer="P0", cause=NOT_READY) for name in names),
        *(failed(name, 4) for name in names),
    )
    told = [finding.request_id for finding in check_progress(frame)]
    assert told == names


# -- NULL-BLOCK -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["load.failed", "block.cached", "block.invalidated"])
def test_the_null_block_undergoes_nothing(frame_of: FrameOf, kind: str) -> None:
    sound = Event(kind, 3, "D0", request_id="r1", group=0, block_ids=[4])
    broken = sound._replace(block_ids=[4, 0])
    assert not check_null_block(frame_of(sound))
    [finding] = check_null_block(frame_of(sound, broken))
    assert (finding.block_id, finding.request_id) == (0, "r1")


def test_tables_may_hold_placeholders(frame_of: FrameOf) -> None:
    frame = frame_of(blocks("allocated", 1, "r1", [0, 0, 3]), blocks("freed", 2, "r1", [3, 0, 0]))
    assert not check_null_block(frame)


# -- FENCE ----------------------------------------------------------------------------------------------------


def test_a_request_that_is_written_twice_at_a_time_is_in_flight_until_both_are_over(frame_of: FrameOf) -> None:
    def blocks(kind: str, request_id: str, time_ns: int) -> Event:
        return Event(kind, time_ns, "D0", request_id=request_id, group=0, block_ids=[7])

    def send(kind: str, time_ns: int) -> Event:
        return Event(kind, time_ns, "P0", request_id="r1", peer="D0", transfer_id="x1")

    had = [blocks("block.allocated", "r1", 1), send("send.started", 2), send("send.started", 3)]
    had += [send("send.finished", 4), blocks("block.freed", "r1", 5)]
    assert check_fence(frame_of(*had, blocks("block.allocated", "r2", 6), send("send.finished", 7)))
    assert not check_fence(frame_of(*had, send("send.finished", 6), blocks("block.allocated", "r2", 7)))


def sending(kind: str, time_ns: int) -> Event:
    return Event(f"send.{kind}", time_ns, "P0", request_id="r1", peer="D0", transfer_id="x1", num_blocks=1)


@pytest.mark.parametrize(("instance", "act"), [("P0", "reads"), ("D0", "writes")])
def test_a_block_in_flight_stays_with_its_owner(frame_of: FrameOf, instance: str, act: str) -> None:
    frame = frame_of(
        blocks("allocated", 1, "r1", [6, 7], instance),
        sending("started", 2),
        blocks("freed", 3, "r1", [7, 6], instance),
        blocks("allocated", 4, "r2", [7], instance),
        sending("finished", 5),
        blocks("allocated", 6, "r3", [6], instance),
    )
    [finding] = check_fence(frame)
    assert finding.detail == f"given to r2 while a transfer of r1 {act} it"
    assert (finding.block_id, finding.transfer_id, finding.time_ns) == (7, "x1", 4)


def test_a_transfer_without_an_end_is_in_flight_for_ever(frame_of: FrameOf) -> None:
    frame = frame_of(blocks("allocated", 1, "r1", [6]), sending("started", 2), blocks("allocated", 9, "r2", [6]))
    assert len(check_fence(frame)) == 1


GONE = Event("fault.injected", 4, "P0", status="peer-crash", cause="peer-crash")
DEAD = Event("engine.crashed", 4, "P0", status="AssertionError", cause="")


@pytest.mark.parametrize("death", [GONE, DEAD, GONE._replace(instance="D0"), GONE._replace(status="engine.restart")])
def test_it_is_over_when_a_process_is_gone(frame_of: FrameOf, death: Event) -> None:
    """Nothing arrives any more at a consumer whose producer, or which itself, is gone; a producer that lives on reads
    until it hears of that."""
    for instance in ("P0", "D0"):
        had = [blocks("allocated", 1, "r1", [6, 7], instance), sending("started", 2)]
        taken = blocks("allocated", 9, "r2", [6], instance)
        assert len(check_fence(frame_of(*had, taken))) == 1
        assert len(check_fence(frame_of(*had, death, taken))) == (death.instance == "D0" and instance == "P0")
        assert len(check_fence(frame_of(death._replace(time_ns=0), *had, taken))) == 1
        assert len(check_fence(frame_of(*had, death._replace(instance="P1"), taken))) == 1


def test_where_attempts_are_fenced_nothing_lands_of_a_pull_that_is_settled(frame_of: FrameOf) -> None:
    """Neither of one that the producer begins to serve afterwards."""
    over = Event("pull.settled", 3, "D0", request_id="r1", peer="P0", rank=0, transfer_id="x1", status="failed")
    had, taken = blocks("allocated", 1, "r1", [6]), blocks("allocated", 9, "r2", [6])
    for events in ([had, sending("started", 2), over, taken], [had, over, sending("started", 4), taken]):
        assert len(check_fence(frame_of(*events))) == 1
        assert not check_fence(frame_of(*events), fences_attempts=True)
        for fences in (False, True):
            found = check_trace(frame_of(*events), DETAIL_BLOCKS, fences_attempts=fences)
            assert ("FENCE" in [finding.checker for finding in found]) != fences
        # It only tells the producer that it need not send any more.
        released = [over._replace(time_ns=8, kind="pull.sent", num_blocks=0), over._replace(time_ns=10, status="ok")]
        assert not check_fence(frame_of(*events[:-1], released[0], taken, released[1]), fences_attempts=True)
    for elsewhere in (over._replace(request_id="r3"), over._replace(peer="P1"), over._replace(instance="D1")):
        assert len(check_fence(frame_of(had, sending("started", 2), elsewhere, taken), fences_attempts=True)) == 1


def test_what_it_had_in_an_earlier_admission_is_in_no_transfer(frame_of: FrameOf) -> None:
    before = [blocks("allocated", 1, "r1", [6], "P0"), blocks("freed", 2, "r1", [6], "P0")]
    taken = blocks("allocated", 9, "r2", [6], "P0")
    assert len(check_fence(frame_of(*before, sending("started", 4), taken))) == 1, "it reads what it has given back"
    for again in (blocks("allocated", 3, "r1", [7], "P0"), blocks("allocated", 3, "r1", [6, 7], "P0")):
        found = check_fence(frame_of(*before, again, sending("started", 4), taken))
        assert len(found) == (6 in (again.block_ids or ()))


def test_what_a_window_has_left_behind_is_in_no_transfer(frame_of: FrameOf) -> None:
    had, left = blocks("allocated", 1, "r1", [6, 7], "P0"), blocks("freed", 2, "r1", [6], "P0")
    taken = blocks("allocated", 9, "r2", [6], "P0")
    assert len(check_fence(frame_of(had, left, sending("started", 3), taken))) == 1
    assert not check_fence(frame_of(had, left._replace(cause="window"), sending("started", 3), taken))


def test_the_same_request_may_get_its_block_again(frame_of: FrameOf) -> None:
    frame = frame_of(
        blocks("allocated", 1, "r1", [6]),
        sending("started", 2),
        blocks("freed", 3, "r1", [6]),
        blocks("allocated", 4, "r1", [6]),
    )
    assert not check_fence(frame)


def test_placeholders_have_no_owner(frame_of: FrameOf) -> None:
    frame = frame_of(blocks("allocated", 1, "r1", [0]), sending("started", 2), blocks("allocated", 4, "r2", [0]))
    assert not check_fence(frame)


# -- RANK-AGREE -----------------------------------------------------------------------------------------------


def pull(kind: str, time_ns: int, rank: int, status: str | None = None) -> Event:
    return Event(f"pull.{kind}", time_ns, "D0", request_id="r1", transfer_id="t", rank=rank, status=status)


COMPLETE = Event("load.finished", 6, "D0", request_id="r1", num_tokens=8)


def test_a_load_is_complete_when_every_rank_has_its_part(frame_of: FrameOf) -> None:
    settled = [pull("settled", 3, 0, "ok"), pull("settled", 5, 1, "ok")]
    assert not check_rank_agree(frame_of(pull("sent", 1, 0), pull("sent", 1, 1), *settled, COMPLETE))


def test_it_is_not_while_a_pull_is_open(frame_of: FrameOf) -> None:
    frame = frame_of(
        pull("sent", 1, 0), pull("sent", 1, 1), pull("settled", 3, 0, "ok"), COMPLETE, pull("settled", 9, 1)
    )
    assert said(check_rank_agree(frame)) == [("D0", "r1", "complete though pull 1 of it is still open")]


def test_it_is_not_if_a_rank_has_failed_unheard(frame_of: FrameOf) -> None:
    events = [pull("sent", 1, 0), pull("sent", 1, 1), pull("settled", 3, 0, "failed"), pull("settled", 4, 1, "ok")]
    assert said(check_rank_agree(frame_of(*events, COMPLETE))) == [
        ("D0", "r1", "complete though pull 0 of it has failed")
    ]
    heard = Event("load.failed", 5, "D0", request_id="r1", num_tokens=8)
    assert not check_rank_agree(frame_of(*events, heard, COMPLETE))


# -- all together ---------------------------------------------------------------------------------------------


def test_a_sound_run_breaks_no_law(frame_of: FrameOf) -> None:
    assert check_trace(frame_of(*pair("r1"), *pair("r2")), DETAIL_BLOCKS, {"r1": 9, "r2": 9}) == []


def test_an_empty_trace_breaks_no_law(frame_of: FrameOf) -> None:
    assert check_trace(frame_of(), DETAIL_BLOCKS, {}) == []


def test_findings_come_in_order_of_time(frame_of: FrameOf) -> None:
    frame = frame_of(*pair("r1"), failed("r1", 6), arrived("r2"), routed("r2"), stalled("r2", 8))
    found = check_trace(frame, DETAIL_RUN, {"r1": 1})
    assert [finding.checker for finding in found] == ["OUTPUT-EQUAL", "EXACTLY-ONCE", "PROGRESS"]


def test_only_laws_that_the_detail_level_can_show_are_checked(frame_of: FrameOf) -> None:
    frame = frame_of(blocks("allocated", 1, "r1", [6]), sending("started", 2), blocks("allocated", 9, "r2", [6]))
    assert check_trace(frame, DETAIL_RUN) == []
    assert [finding.checker for finding in check_trace(frame, DETAIL_BLOCKS)] == ["FENCE"]


def test_every_law_has_a_name_of_its_own() -> None:
    assert len({checker.name for checker in trace_checkers()}) == len(trace_checkers())
