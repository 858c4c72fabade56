"""An engine with a CPU tier: what is stored comes back, and is worth what it saves."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvreplay.events import DETAIL_BLOCKS, DETAIL_STEPS
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.config import ConnectorConfig, ReplayConfig
from kvreplay.trace.workload import Workload
from tests.scenarios.offload_stage import TEXT, offloading, there_and_back
from tests.scenarios.stage import Play, both_ways, judge, play, request, workload

FULL = KVCacheGroupSpec(block_size=4, bytes_per_token=1)
WINDOW = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8, bytes_per_token=1)
STATES = KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode=MAMBA_ALIGN, state_bytes=4)
LAYOUTS = {"full": (FULL,), "full-window": (FULL, WINDOW), "full-mamba": (FULL, STATES)}


def test_a_prompt_comes_back_from_the_cpu() -> None:
    assert play(offloading(), there_and_back()).story("a", "b") == [
        "0 E0 a request.routed",
        "1 E0 a lookup tokens=0 blocks=0 status=none",
        "1 E0 a store.started blocks=4",
        "11 E0 a request.first_token",
        "21 E0 a store.finished blocks=4",  # it began with the second step, and is reported at its end
        "31 E0 a request.finished tokens=3 status=length",
        "400 E0 b request.routed",
        "401 E0 b lookup tokens=16 blocks=0 status=async",
        "401 E0 b load.started tokens=16 blocks=4 status=CPU",
        "401 E0 b request.parked tokens=16 blocks=4",
        "402 E0 b load.finished tokens=16",
        "403 E0 b request.promoted tokens=15 status=ok",
        "403 E0 b tokens.recomputed tokens=1 cause=full-hit-last-token",
        "413 E0 b request.first_token",
        "433 E0 b request.finished tokens=3 status=length",
    ]


def test_a_step_waits_for_a_load_within_its_budget() -> None:
    """A token must be left to compute: `c` has one more than what is there."""
    requests = there_and_back()
    longer = request("c", 400, prompt_tokens=17, text=[*TEXT, "e"])
    config = offloading(sync_load_budget_bytes=64, load_bytes_per_s=1000)  # 16 bytes take 16 ms
    played = play(config, workload(*requests.arrivals[:2], longer))
    assert played.story("c")[1:4] == [
        "401 E0 c lookup tokens=16 blocks=0 status=sync",
        "401 E0 c load.started tokens=16 blocks=4 status=CPU",
        "427.001 E0 c load.finished tokens=16",
    ]
    assert not played.violations
    assert played.ends()["c"][0] == "finished"


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("prompt_only", [True, False])
@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_what_is_loaded_is_right(layout: str, prompt_only: bool, behaviour: str, tmp_path: Path) -> None:
    config = offloading(*LAYOUTS[layout], num_gpu_blocks=40, offload_prompt_only=prompt_only, cpu_chunks=128)
    fillers = [request(f"f{place}", 100 + 150 * place, prompt_tokens=60) for place in range(4)]
    requests = workload(
        request("a", 0, prompt_tokens=19, text="abcde"),
        *fillers,
        request("b", 1000, prompt_tokens=23, text="abcdef"),
    )
    summary = judge(tmp_path, config, requests, behaviour=behaviour)
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    assert summary.tiers.hit_tokens["CPU"] == summary.loaded_tokens == summary.tiers.saved_tokens == 16


def test_hits_by_tier_add_up_to_what_is_not_computed(tmp_path: Path) -> None:
    """Over all requests: prompt and output tokens are computed, but for the last, or found in a tier."""
    config = offloading(num_gpu_blocks=30)
    requests = _sessions()
    summary = judge(tmp_path, config, requests)
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    played = play(config, requests, detail=DETAIL_STEPS)
    scheduled = sum(event.num_tokens or 0 for event in played.of("step"))
    assert scheduled == summary.computed_tokens
    needed = sum(arrival.prompt_tokens + arrival.output_tokens - 1 for arrival in requests.arrivals)
    last_tokens = summary.recomputed_tokens.by_cause.get("full-hit-last-token", 0)
    lost = summary.recomputed_tokens.by_cause.get("preemption", 0)
    found = sum(summary.tiers.hit_tokens.values())
    assert needed + last_tokens + lost == scheduled + found
    loads = [event.num_tokens or 0 for event in played.of("load.started")]
    assert summary.tiers.hit_tokens["CPU"] == sum(loads) > 0
    evicted = [event for event in played.of("block.evicted") if event.status == "CPU"]
    assert sum(event.num_blocks or 0 for event in evicted) == sum(
        sum(causes.values()) for causes in summary.tiers.evicted_chunks.values()
    )


def test_hits_save_what_a_run_without_a_tier_computes_again(tmp_path: Path) -> None:
    with_tier = judge(tmp_path, offloading(num_gpu_blocks=30), _sessions())
    without = judge(tmp_path, _without_tier(offloading(num_gpu_blocks=30)), _sessions())
    assert with_tier.tiers is not None
    assert without.tiers is None
    again, yet = without.recomputed_tokens.by_cause, with_tier.recomputed_tokens.by_cause
    saved = again["eviction"] - yet.get("eviction", 0)
    assert saved == with_tier.tiers.saved_tokens - yet.get("full-hit-last-token", 0) > 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_shortcuts_change_nothing(layout: str) -> None:
    """Single steps without lockstep, event for event."""
    config = offloading(*LAYOUTS[layout], num_gpu_blocks=48, cpu_chunks=40)
    runs = both_ways(config, _sessions())
    assert _told(runs[0]) == _told(runs[1])


def test_a_request_that_only_decodes_is_stored_again_after_a_reset() -> None:
    config, requests = offloading(), workload(request("a", prompt_tokens=16, output_tokens=20, text=TEXT))
    runs = both_ways(config, requests, "cache.reset:at=95ms,what=connector")
    assert _told(runs[0]) == _told(runs[1])
    assert len(runs[0].of("store.started")) == 2


def test_a_cpu_tier_that_is_full_evicts(tmp_path: Path) -> None:
    summary = judge(tmp_path, offloading(num_gpu_blocks=30, cpu_chunks=16), _sessions())
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    assert summary.tiers.peak_cpu_chunks == summary.tiers.cpu_chunks == 16
    assert summary.tiers.evicted_chunks["CPU"]["capacity"] > 0
    assert summary.evicted_blocks.by_cause.keys() == {"capacity"}  # of the GPU's pool only


def test_a_tier_without_room_is_offered_the_same_again_and_again(tmp_path: Path) -> None:
    """H6: in every step of the request's life, and once more at its end."""
    summary = judge(tmp_path, offloading(cpu_chunks=2), workload(request("a", prompt_tokens=16, output_tokens=5)))
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    assert summary.tiers.refused_offers == 6


def test_a_refused_offer_of_a_single_step_is_made_twice(tmp_path: Path) -> None:
    """While it runs, and at its end."""
    summary = judge(tmp_path, offloading(cpu_chunks=2), workload(request("a", prompt_tokens=16, output_tokens=1)))
    assert summary.tiers is not None
    assert summary.tiers.refused_offers == 2


@pytest.mark.parametrize(("prompt_only", "stored"), [(True, 1), (False, 1)])
def test_the_slot_of_the_last_token_was_never_written(prompt_only: bool, stored: int) -> None:
    """Seven tokens and one: the second block is full by number only."""
    requests = workload(request("a", prompt_tokens=7, output_tokens=1))
    played = play(offloading(offload_prompt_only=prompt_only), requests)
    assert sum(event.num_blocks or 0 for event in played.of("store.started")) == stored


@pytest.mark.parametrize(("prompt_only", "stored"), [(True, 1), (False, 2)])
def test_what_is_generated_is_stored_only_if_asked_for(prompt_only: bool, stored: int) -> None:
    requests = workload(request("a", prompt_tokens=7, output_tokens=3))
    played = play(offloading(offload_prompt_only=prompt_only), requests)
    assert sum(event.num_blocks or 0 for event in played.of("store.started")) == stored


def test_a_request_preempted_by_a_reset_asks_again_one_step_later() -> None:
    """Its stores are flushed in the step in which it is looked up: the copy is over, and not acknowledged."""
    config = offloading(num_gpu_blocks=40, store_bytes_per_s=1000)
    played = play(config, workload(request("r", prompt_tokens=16, text=TEXT)), "cache.reset:at=15ms,what=running")
    assert not played.violations
    assert [event.num_tokens for event in played.of("lookup")] == [0, None, 16]


def test_blocks_given_away_wait_for_their_store() -> None:
    """A store of 4 blocks takes 160 ms: `f`, which gets them, is held up until they have been read."""
    config = offloading(store_bytes_per_s=100)
    played = play(config, there_and_back(f_ms=50, b_ms=1500))
    assert not played.violations
    (first,) = played.of("request.first_token", request_id="f")
    assert first.time_ns > 181 * NS_PER_MS  # without that: at 71
    assert [event.status for event in played.of("lookup", request_id="b")] == ["async"]


def test_a_second_request_waits_for_the_first_ones_load() -> None:
    requests = there_and_back()
    longer = request("c", 400, prompt_tokens=17, text=[*TEXT, "e"])
    played = play(offloading(load_bytes_per_s=1000), workload(*requests.arrivals, longer))
    assert [event.num_tokens for event in played.of("lookup", request_id="c")] == [None, 0]
    assert len(played.of("load.started")) == 1
    assert not played.violations


def test_a_reset_of_both_caches_forgets_what_is_stored(tmp_path: Path) -> None:
    summary = judge(tmp_path, offloading(), there_and_back(), "cache.reset:at=300ms,what=both")
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    assert "CPU" not in summary.tiers.hit_tokens


def test_an_engine_that_was_restarted_has_an_empty_tier(tmp_path: Path) -> None:
    fault = "peer-crash:instance=E0,at=300ms,down=10ms"
    summary = judge(tmp_path, offloading(), there_and_back(), fault)
    assert summary.requests.finished == 3
    assert summary.tiers is not None
    assert "CPU" not in summary.tiers.hit_tokens


def _sessions() -> Workload:
    return workload(
        *(
            request(
                f"s{session}t{turn}",
                session * 37 + turn * 400,
                prompt_tokens=13 + 8 * turn,
                output_tokens=5,
                text=["x", *(f"{session}.{place}" for place in range(16))],
            )
            for session in range(6)
            for turn in range(4)
        )
    )


def _without_tier(config: ReplayConfig) -> ReplayConfig:
    return replace(config, connector=ConnectorConfig())


def _told(played: Play) -> Counter[str]:
    """But for shares, which members of lockstep have not, and for when they hash what they fill."""
    hidden = ("request.scheduled", "block.cached")
    return Counter(line for line in played.story(detail=DETAIL_BLOCKS) if not any(kind in line for kind in hidden))


def test_what_a_tier_has_done_is_not_forgotten_with_the_engine(tmp_path: Path) -> None:
    """It dies when all is done, and is built anew when faults are healed."""
    alive = judge(tmp_path, offloading(), there_and_back())
    dead = judge(tmp_path, offloading(), there_and_back(), "peer-crash:at=600ms")
    assert alive.tiers is not None
    assert alive.tiers.stored.bytes > 0
    assert dead.tiers == alive.tiers


def test_a_job_that_is_flushed_again_and_again_is_one_job() -> None:
    """Nobody hears of its end: it is asked for again whenever its blocks are about to be given away."""
    played = play(offloading(num_gpu_blocks=30), _sessions(), "offload.done-lost")
    flushed = [event.num_tokens or 0 for event in played.of("usage") if event.status == "flushed_jobs"]
    assert 0 < flushed[-1] <= len(played.of("store.started", "load.started"))
