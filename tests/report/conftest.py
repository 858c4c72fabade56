"""One run of a pair that has a bit of everything to report."""

import pytest

from kvreplay.verdict.exit_status import ExitStatus
from kvreplay.verdict.model import (
    Crash,
    Evicted,
    FaultCount,
    InEffect,
    Instance,
    Latency,
    Loads,
    Percentiles,
    Reason,
    Recomputed,
    Requests,
    Series,
    Stall,
    Summary,
    Violation,
)


def _stall(index: int) -> Stall:
    return Stall(
        request_id=f"conversation-{index:04}",
        instance=f"decode-{index % 2}",
        status="WAITING_FOR_REMOTE_KVS",
        since_s=100.25 + index,
        waiting_on="the reply of a pull",
        blocks_held=750,
        block_seconds=750_000.0 - index,
        peer="prefill-0",
        transfer_id=f"x-{index}",
        fault="timeout:p=0.02",
        implied={"PROGRESS": 1} if index == 0 else {},
    )


def _violation(index: int, fault: str | None) -> Violation:
    return Violation(
        checker="CONTENT",
        time_s=12.5 + index,
        instance="decode-0",
        request_id=f"conversation-{index:04}",
        block_id=41 + index,
        group=0,
        transfer_id=f"x-{index}",
        detail="token 656 reads what was never written",
        fault=fault,
    )


def _instance(name: str, role: str, overloaded: str | None = None) -> Instance:
    return Instance(
        id=name,
        role=role,
        steps=86_000,
        peak_blocks=60_123,
        preemptions=3,
        utilisation=0.5987,
        num_gpu_blocks=131_072,
        computed_tokens=172_000_000,
        loaded_tokens=860_000,
        overloaded=overloaded,
    )


def _series(role: str) -> Series:
    return Series(
        role=role,
        num_instances=2,
        capacity_blocks=262_144,
        time_s=[float(at) for at in range(10, 3610, 10)],
        blocks=[728 * at for at in range(360)],
        running=[at % 7 for at in range(360)],
        queued=[0] * 360,
        deferred=[int(at > 180) for at in range(360)],
    )


@pytest.fixture
def summary() -> Summary:
    percentiles = Percentiles(p50=2.107791, p90=0.0291, p99=118.4, count=11_779)
    return Summary(
        verdict="stalled",
        exit_status=ExitStatus.STALLED,
        reason="240 requests will never end, all waiting on the reply of a pull",
        fingerprint="0123456789abcdef",
        seed=7,
        profile="pre-50984",
        virtual_seconds=3601.2,
        wall_seconds=None,
        requests=Requests(
            total=12_031,
            finished=11_779,
            failed=12,
            aborted=0,
            rejected=0,
            stalled=240,
            overdue=2,
            lost=200,
            held_up=40,
            failed_unfaulted=2,
        ),
        reasons=[Reason(outcome="failed", cause="kv load failure", count=12)],
        stalled=[_stall(index) for index in range(240)],
        recomputed_tokens=Recomputed(total=12_345, by_cause={"eviction": 345, "load-failure": 12_000}),
        computed_tokens=344_000_000,
        loaded_tokens=1_720_000,
        loads=Loads(started=12_031, finished=11_779, failed=12, failed_by_cause={"timeout": 12}),
        evicted_blocks=Evicted(
            total=2_345,
            by_cause={"capacity": 2_300, "load-failure": 45},
            by_group={"0": 2_345},
            by_group_and_cause={"0": {"capacity": 2_300, "load-failure": 45}},
        ),
        violations=[_violation(index, "corrupt:p=0.01") for index in range(12)] + [_violation(99, None)],
        faults=[
            FaultCount(
                spec="timeout:p=0.02", name="timeout", fired=252, requests=252, outcomes={"stalled": 240, "failed": 12}
            ),
            FaultCount(spec="slow:nth=9000", name="slow", fired=0, requests=0),
        ],
        crashes=[
            Crash(instance="prefill-1", time_s=3000.5, step=None, exception="AssertionError", message="block 3 is free")
        ],
        latency_s=Latency(ttft=percentiles, tpot=percentiles, e2e=percentiles),
        instances=[
            _instance("prefill-0", "prefill", "computed 97 % of the time"),
            _instance("decode-0", "decode"),
        ],
        series=[_series("prefill"), _series("decode")],
        in_effect=InEffect(
            trace="conv.parquet",
            config="mooncake-4p4d",
            config_origin="--config",
            profile="pre-50984",
            profile_origin="--profile",
            policy="fail",
            policy_origin="vLLM's default",
            seed=7,
            limit=1000,
            injected=["timeout:p=0.02", "slow:nth=9000"],
            settings=["cache.num_gpu_blocks=512"],
        ),
    )
