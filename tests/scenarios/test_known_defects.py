"""What is still wrong with Mooncake in 0.33.0: each shows in a run, and none of it is there ideally."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from kvreplay.ids import NS_PER_S
from kvreplay.replay.config import ReplayConfig
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import Workload
from kvreplay.verdict.model import Summary
from tests.scenarios.stage import Sizes, judge, pair, request, role, workload
from tests.scenarios.test_hybrid_pulls import STATES as MAMBA_GROUPS
from tests.scenarios.test_hybrid_pulls import hybrid

ONE = workload(request("a"))
TWO = workload(request("a"), request("b"))
ROUNDS = workload(request("a0"), request("b0"), request("a1", 1000), request("b1", 1000))
TURNS = workload(*(request(f"r{place}", place * 200) for place in range(4)))
SMALL = role(num_gpu_blocks=17)


STATES = hybrid(MAMBA_GROUPS)


def two_producers(ranks: tuple[Sizes, Sizes]) -> ReplayConfig:
    """P0 gets every other request, from `a0` on."""
    config = pair(ranks=ranks)
    return replace(config, topology=replace(config.topology, prefill=2))


@dataclass(frozen=True)
class Defect:
    name: str
    config: ReplayConfig
    requests: Workload
    faults: tuple[str, ...]
    shows: Sequence[str]
    """Laws that are broken, in order; `stall`: requests never end, `crash`: an engine dies."""


DEFECTS = [
    Defect(
        "F12: a missing rank loses the pulls of healthy engines in the same step",
        two_producers(((2, 1), (2, 1))),
        ROUNDS,
        ("mooncake.bootstrap-partial-ranks:which=first,peer=P0",),
        ["stall"],
    ),
    Defect(
        "F13: an end that a producer does not know loses the other ends of its step",
        pair(),
        workload(request("a"), request("b", 1, prompt_tokens=40), request("c", 1)),
        ("mooncake.dup-transfer-id:request=[ab]",),
        ["CONSERVATION", "NO-FATAL"],
    ),
    Defect("F14: a request without its parameters", pair(), ONE, ("mooncake.missing-params:instance=D0",), ["stall"]),
    Defect(
        "F15: blocks of a shared transfer id", pair(), TWO, ("mooncake.dup-transfer-id",), ["CONSERVATION", "CONTENT"]
    ),
    Defect("F16: a raising engine call", pair(), ONE, ("mooncake.engine-raise",), ["CONSERVATION"]),
    Defect(
        "bytes that land after the call has failed",
        pair(decode=SMALL),
        workload(request("a", prompt_tokens=40), request("b", 60, prompt_tokens=40, output_tokens=8)),
        ("mooncake.engine-late:request=a,delay=75ms",),
        ["CONTENT", "FENCE"],
    ),
    Defect(
        "half of every block, and nobody notices",
        pair(ranks=((2, 1), (1, 1))),
        ONE,
        ("mooncake.bootstrap-partial-ranks:which=last",),
        ["CONTENT"],
    ),
    Defect("a stray message ends the listener", pair(), TURNS, ("mooncake.listener-dead:request=r1",), ["NO-FATAL"]),
    Defect(
        "a chain of kv_both instances: the state that is pulled is a token too old",
        replace(STATES, connector=pair(kv_role="kv_both").connector),
        workload(request("a", prompt_tokens=9)),
        ("mooncake.kv-both-chain",),
        ["CONTENT"],
    ),
    Defect("parameters of the other role", pair(), ONE, ("mooncake.role-mismatch:instance=D0",), ["crash"]),
    Defect(
        "a rank's report that is lost",
        pair(ranks=((1, 1), (2, 1))),
        ONE,
        ("mooncake.rank-silent:rank=1,instance=D0",),
        ["stall"],
    ),
]


def shown(summary: Summary) -> list[str]:
    laws = {found.checker for found in summary.violations}
    laws |= {"stall"} if summary.stalled else set()
    laws |= {"crash"} if summary.crashes else set()
    return sorted(laws)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_it_shows(defect: Defect, tmp_path: Path) -> None:
    summary = judge(tmp_path, defect.config, defect.requests, *defect.faults)
    assert shown(summary) == defect.shows
    planned = {fault.spec for fault in summary.faults}
    assert {found.fault for found in summary.violations} <= planned
    assert {stall.fault for stall in summary.stalled} <= planned


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.name)
def test_ideally_it_is_not_there(defect: Defect, tmp_path: Path) -> None:
    summary = judge(tmp_path, defect.config, defect.requests, *defect.faults, behaviour="ideal", policy="recompute")
    assert shown(summary) == []
    assert summary.requests.finished == summary.requests.total


def test_of_f13_a_healthy_requests_end_is_lost(tmp_path: Path) -> None:
    """`c` shares nothing with anybody, but the step in which it ends on its producer."""
    defect = next(defect for defect in DEFECTS if defect.name.startswith("F13"))
    summary = judge(tmp_path, defect.config, defect.requests, *defect.faults)
    assert {found.request_id for found in summary.violations} == {"b", "c"}


@pytest.mark.parametrize(("behaviour", "seconds"), [("vllm-0.33", 480), ("ideal", 0)])
def test_waiters_of_a_popped_entry_are_not_woken(tmp_path: Path, behaviour: str, seconds: int) -> None:
    """It is aborted on its producer while the pull waits: nobody tells the consumer, who waits for nothing."""
    output = tmp_path / "out.parquet"
    long = workload(request("a", prompt_tokens=60))
    fault = "mooncake.p-abort-while-waiting"
    summary = judge(tmp_path, pair(), long, fault, behaviour=behaviour, output=output)
    assert (summary.requests.failed, summary.reasons[0].cause) == (
        1,
        "Timeout waiting for P side ready." if seconds else "P dropped the request",
    )
    (end_ns,) = read_trace(output).rows(["request.failed"], ["time_ns"]).column("time_ns").to_pylist()
    assert round(end_ns / NS_PER_S) == seconds
    assert [(found.checker, found.request_id, found.detail, found.fault) for found in summary.violations] == (
        [("PROGRESS", "a", "waited 480 s for blocks that P0 had given up", fault)] if seconds else []
    )


def test_of_the_first_healthy_engines_requests_stall_too(tmp_path: Path) -> None:
    defect = DEFECTS[0]
    summary = judge(tmp_path, defect.config, defect.requests, *defect.faults)
    assert {stall.request_id for stall in summary.stalled} == {"a0", "a1", "b1"}
