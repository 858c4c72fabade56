"""The verdict: what outweighs what, and what --fail-on takes in and leaves out."""

from itertools import product

import pytest

from kvreplay.errors import ConfigError
from kvreplay.verdict.exit_status import ExitStatus
from kvreplay.verdict.model import DEFAULT_FAIL_ON, Crash, Requests, Stall, Violation
from kvreplay.verdict.verdict import judge, parse_fail_on


def requests(**counts: int) -> Requests:
    zero = dict.fromkeys(("total", "finished", "failed", "aborted", "rejected", "stalled", "overdue"), 0)
    return Requests(**{**zero, **counts})


def stall(waiting_on: str = "a reply", ended: str | None = None) -> Stall:
    return Stall(
        request_id="r1",
        instance="D0",
        status="WAITING_FOR_REMOTE_KVS",
        since_s=1.0,
        waiting_on=waiting_on,
        blocks_held=2,
        block_seconds=4.0,
        ended=ended,
    )


CRASH = Crash(instance="D0", time_s=3.5, step=17, exception="AssertionError", message="block 3")
VIOLATION = Violation(
    checker="CONTENT",
    time_s=3.0,
    instance="D0",
    request_id="r1",
    block_id=3,
    group=0,
    transfer_id=None,
    detail="wrong",
    fault=None,
)
STALLED = requests(total=2, finished=1, stalled=1, lost=1)


@pytest.mark.parametrize(("crashed", "stalled", "violated"), list(product([False, True], repeat=3)))
def test_crashed_outweighs_stalled_outweighs_violated(crashed: bool, stalled: bool, violated: bool) -> None:
    verdict = judge(
        STALLED if stalled else requests(total=2, finished=2),
        [stall()] * stalled,
        [CRASH] * crashed,
        [VIOLATION] * violated,
    )
    expected = "crashed" if crashed else "stalled" if stalled else "violated" if violated else "passed"
    assert (verdict.word, verdict.status) == (expected, ExitStatus[expected.upper()])


def test_exit_statuses_are_an_interface() -> None:
    assert {status.name: int(status) for status in ExitStatus} == {
        "PASSED": 0,
        "VIOLATED": 3,
        "STALLED": 4,
        "CRASHED": 5,
    }


@pytest.mark.parametrize(
    ("counts", "word", "fail_on", "status"),
    [
        ({"failed": 1}, "failed", DEFAULT_FAIL_ON, ExitStatus.PASSED),
        ({"failed": 1}, "failed", ("failed",), ExitStatus.VIOLATED),
        ({"rejected": 1}, "rejected", DEFAULT_FAIL_ON, ExitStatus.PASSED),
        ({"rejected": 1}, "rejected", (*DEFAULT_FAIL_ON, "rejected"), ExitStatus.VIOLATED),
        ({"aborted": 1}, "aborted", DEFAULT_FAIL_ON, ExitStatus.PASSED),
        ({"aborted": 1}, "aborted", ("aborted",), ExitStatus.VIOLATED),
        ({"overdue": 1}, "overdue", DEFAULT_FAIL_ON, ExitStatus.PASSED),
        ({"overdue": 1}, "overdue", ("overdue",), ExitStatus.VIOLATED),
    ],
)
def test_other_ends_count_only_where_asked(
    counts: dict[str, int], word: str, fail_on: tuple[str, ...], status: ExitStatus
) -> None:
    verdict = judge(requests(total=2, finished=1, **counts), [], [], [], fail_on)
    assert verdict.status == status
    assert (word in verdict.reason) == (word != "overdue" or status == ExitStatus.VIOLATED)


def test_a_fault_that_never_fired_counts_only_where_asked() -> None:
    clean = requests(total=2, finished=2)
    assert judge(clean, [], [], [], unfired=["slow:nth=9"]).status == ExitStatus.PASSED
    assert judge(clean, [], [], [], ("unfired",), ["slow:nth=9", "abort"]) == (
        ExitStatus.VIOLATED,
        "never fired: slow:nth=9, abort",
    )
    assert judge(clean, [], [], [], ("unfired",)).status == ExitStatus.PASSED
    assert judge(clean, [], [], [], ("unfired",), [], ["peer-crash"]) == (
        ExitStatus.VIOLATED,
        "fired only after every request had ended: peer-crash",
    )


def test_what_is_left_out_is_still_said() -> None:
    verdict = judge(requests(total=2, finished=2), [], [CRASH], [], ("stalled",))
    assert verdict == (
        ExitStatus.PASSED,
        "all 2 requests finished; left out by --fail-on: D0 died at 3.500 s of AssertionError: block 3",
    )


@pytest.mark.parametrize(
    ("counts", "reason"),
    [
        ({"total": 0}, "no requests"),
        ({"total": 1, "finished": 1}, "the request finished"),
        ({"total": 1200, "finished": 1200}, "all 1,200 requests finished"),
        (
            {"total": 9, "finished": 6, "failed": 2, "aborted": 1, "failed_unfaulted": 1},
            "6 of 9 requests finished, 2 failed, 1 aborted",
        ),
        (
            {"total": 9, "finished": 7, "failed": 2},
            "7 of 9 requests finished, 2 failed; every failure follows from a fault",
        ),
    ],
)
def test_a_passed_run_says_how(counts: dict[str, int], reason: str) -> None:
    assert judge(requests(**counts), [], [], []).reason == reason


@pytest.mark.parametrize(
    ("counts", "stalls", "reason"),
    [
        ({"stalled": 1, "lost": 1}, [stall()], "1 request will never end, waiting on a reply"),
        ({"stalled": 2, "lost": 2}, [stall(), stall()], "2 requests will never end, all waiting on a reply"),
        (
            {"stalled": 3, "lost": 1, "held_up": 2},
            [stall(), stall(ended="finished"), stall("a slot", ended="finished")],
            "3 requests will never end, 2 of them waiting on a reply",
        ),
        (
            {"stalled": 1, "held_up": 1},
            [stall(ended="finished")],
            "1 request ended only after the faults were taken away, waiting on a reply",
        ),
        ({"finished": 1}, [stall()], "1 leg of answered requests never ended, waiting on a reply"),
    ],
)
def test_a_stalled_run_says_what_it_waits_on(counts: dict[str, int], stalls: list[Stall], reason: str) -> None:
    assert judge(requests(total=3, **counts), stalls, [], []).reason == reason


def test_fail_on_takes_words_in_any_order() -> None:
    assert parse_fail_on("overdue, crashed") == ("crashed", "overdue")
    assert parse_fail_on("none") == ()


def test_fail_on_default_adds_to_what_counts_anyway() -> None:
    assert parse_fail_on("default") == DEFAULT_FAIL_ON
    assert parse_fail_on("rejected,default") == (*DEFAULT_FAIL_ON, "rejected")


@pytest.mark.parametrize("text", ["stall", "", "crashed,none"])
def test_fail_on_refuses_other_words(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--fail-on .* is none of crashed, stalled, violated, failed, rejected, "):
        parse_fail_on(text)


def test_fail_on_offers_the_nearest_word() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'stalled'\?$"):
        parse_fail_on("stall")
