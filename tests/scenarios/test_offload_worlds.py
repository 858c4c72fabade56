"""Random engines with CPU tiers, random clients and faults: `ideal` breaks no law, and shortcuts change nothing."""

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from kvreplay.connectors.offloading.scheduler import OffloadingScheduler
from kvreplay.engine.scheduler import Scheduler
from kvreplay.events import DETAIL_BLOCKS
from kvreplay.faults.catalogue import catalogue
from kvreplay.kv.specs import SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig
from kvreplay.trace.workload import Workload
from tests.scenarios.offload_stage import STATES, hybrid, offloading
from tests.scenarios.stage import Play, both_ways, play, request, workload

FULL = KVCacheGroupSpec(block_size=4, bytes_per_token=1)


def window(size: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=size, bytes_per_token=1)


LAYOUTS = ((), (FULL, window(8)), (FULL, STATES), (window(8),), (FULL, window(5)), (FULL, window(8), STATES))
FAULTS = [name for name in catalogue() if name.startswith("offload.")]
TIER_FAULTS = ["offload.promotion-fail", "offload.tier-store-fail", "offload.tier-slow"]
SEEDS = range(16)


def a_config(rng: Random) -> tuple[ReplayConfig, bool]:
    """And whether it has a tier behind the CPU's."""
    layout = rng.choice(LAYOUTS)
    options: dict[str, Any] = {
        "cpu_chunks": rng.choice([4, 8, 16, 40, 128]),
        "offload_prompt_only": rng.random() < 0.6,
        "eviction_policy": rng.choice(["lru", "arc"]),
        "store_bytes_per_s": rng.choice([200, 2000, 10**9]),
        "load_bytes_per_s": rng.choice([200, 2000, 10**9]),
        "sync_load_budget_bytes": rng.choice([0, 0, 64]),
        "blocks_per_chunk": rng.choice([1, 1, 2]),
    }
    has_tier = rng.random() < 0.3
    if has_tier:
        options |= {"spec_name": "TieringOffloadingSpec", "tier_latency": rng.choice([1e-5, 1e-3, 0.02])}
    if layout and rng.random() < 0.5:
        return hybrid(*layout, num_gpu_blocks=rng.choice([40, 60]), budget=rng.choice([16, 32]), **options), has_tier
    return offloading(*layout, num_gpu_blocks=rng.choice([40, 60] if layout else [17, 20, 30]), **options), has_tier


def some_clients(rng: Random) -> Workload:
    requests = []
    for place in range(rng.randint(3, 12)):
        letter = rng.choice("ABC")
        shared = [f"{letter}{index}" for index in range(rng.randint(0, 6))]
        limit = {rng.choice(["max_load_tokens", "max_offload_tokens"]): rng.randint(0, 30)}
        params = {"kv_transfer_params": limit} if rng.random() < 0.2 else {}
        requests.append(
            request(
                f"r{place}",
                rng.randint(0, 1500),
                prompt_tokens=rng.randint(1, 50),
                output_tokens=rng.randint(1, 12),
                text=[*shared, *(f"{place}.{index}" for index in range(20))],
                **params,
            )
        )
    aborts = [(each.request_id, rng.randint(0, 1600)) for each in requests if rng.random() < 0.15]
    return workload(*requests, aborts=aborts)


def some_faults(rng: Random, *, has_tier: bool) -> list[str]:
    possible = [name for name in FAULTS if has_tier or name not in TIER_FAULTS]
    faults = [f"{name}:p={rng.choice([0.1, 0.3, 0.7])}" for name in rng.sample(possible, rng.randint(0, 4))]
    if rng.random() < 0.4:
        what = rng.choice(["gpu", "connector", "both", "running", "all"])
        faults.append(f"cache.reset:at={rng.randint(20, 1500)}ms,what={what}")
    if rng.random() < 0.3:
        faults.append("scheduler.preempt:p=0.4")
    return faults


def told(played: Play) -> Counter[str]:
    """But for what members of lockstep have not, and how often a lookup was asked that changes nothing."""
    hidden = ("request.scheduled", "block.cached", " lookup ")
    lines = played.story(detail=DETAIL_BLOCKS)
    return Counter(line for line in lines if not any(kind in line for kind in hidden))


@pytest.mark.parametrize("seed", SEEDS)
def test_ideal_is_worth_the_name(seed: int) -> None:
    rng = Random(seed)
    config, has_tier = a_config(rng)
    clients, faults = some_clients(rng), some_faults(rng, has_tier=has_tier)
    recompute = rng.random() < 0.6
    quick, plain = both_ways(config, clients, *faults, behaviour="ideal", recompute=recompute, seed=seed)
    assert not quick.of("violation", "engine.crashed", "request.stalled")
    assert told(quick) == told(plain)


@pytest.mark.parametrize("seed", SEEDS)
def test_without_faults_0_33_breaks_no_law(seed: int) -> None:
    """Its hazards need resets, clients' limits, tiers too small, or windows at a request's end."""
    rng = Random(1000 + seed)
    config, _ = a_config(rng)
    played = play(config, some_clients(rng))
    assert not played.of("violation", "engine.crashed", "request.stalled")


@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_a_new_block_is_emptied_when_its_last_owner_has_been_stored(behaviour: str) -> None:
    """Here a member of lockstep takes it in the very step in which its owner is preempted."""
    rng = Random(2416)
    config, _ = a_config(rng)
    own = config.roles["engine"]
    config = replace(config, roles={"engine": replace(own, cache=replace(own.cache, num_gpu_blocks=48))})
    played = play(config, some_clients(rng), behaviour=behaviour)
    assert not played.of("violation")


def overlapping(config: ReplayConfig) -> ReplayConfig:
    """The same engine with async scheduling."""
    roles = {
        name: replace(role, scheduler=replace(role.scheduler, async_scheduling=True))
        for name, role in config.roles.items()
    }
    return replace(config, roles=roles)


@pytest.mark.parametrize("seed", SEEDS)
def test_ideal_breaks_no_law_with_overlapping_steps(seed: int) -> None:
    rng = Random(2000 + seed)
    config, has_tier = a_config(rng)
    clients, faults = some_clients(rng), some_faults(rng, has_tier=has_tier)
    recompute = rng.random() < 0.6
    played = play(overlapping(config), clients, *faults, behaviour="ideal", recompute=recompute, seed=seed)
    assert not played.of("violation", "engine.crashed", "request.stalled")


@pytest.mark.parametrize("seed", SEEDS)
def test_without_faults_0_33_breaks_no_law_with_overlapping_steps(seed: int) -> None:
    rng = Random(3000 + seed)
    config, _ = a_config(rng)
    played = play(overlapping(config), some_clients(rng))
    assert not played.of("violation", "engine.crashed", "request.stalled")


def reset_while_decoding(seed: int) -> tuple[ReplayConfig, Workload, str]:
    """Windows leave blocks behind in steps that the connector is not shown; then all is to be stored again."""
    rng = Random(seed)
    layout = rng.choice([(FULL, window(8)), (window(8),), (FULL, window(5))])
    config = offloading(*layout, num_gpu_blocks=rng.choice([40, 44]), cpu_chunks=128)
    requests = [
        request(f"r{place}", rng.randint(0, 400), prompt_tokens=rng.randint(8, 30), output_tokens=rng.randint(15, 33))
        for place in range(8)
    ]
    return config, workload(*requests), f"cache.reset:at={rng.randint(150, 700)}ms,what=connector"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_reset_stores_nothing_of_blocks_that_were_given_away_unseen(seed: int) -> None:
    config, clients, reset = reset_while_decoding(seed)
    quick, plain = both_ways(config, clients, reset, behaviour="ideal")
    assert not quick.violations
    assert told(quick) == told(plain)


def test_it_would_without_a_look_at_what_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OffloadingScheduler, "_forget_what_is_not_held", lambda *_: None)
    worlds = map(reset_while_decoding, SEEDS)
    found = {
        event.status
        for config, clients, reset in worlds
        for event in play(config, clients, reset, behaviour="ideal").violations
    }
    assert "STORE-CONTENT" in found


def test_ideal_engines_with_windows_coast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of what they generate is stored, so that nobody need look at their steps."""
    coasts: list[int] = []
    real = Scheduler.coast

    def coast(self: Scheduler, num_steps: int) -> int:
        coasts.append(num_steps)
        return real(self, num_steps)

    monkeypatch.setattr(Scheduler, "coast", coast)
    config = offloading(FULL, window(8), num_gpu_blocks=60)
    played = play(config, workload(request("a", prompt_tokens=8, output_tokens=40)), behaviour="ideal", detail=0)
    assert played.ends()["a"][0] == "finished"
    assert sum(coasts) > 20


SYNC_FAULTS = [f"offload.{name}" for name in ("ack-lost", "not-ready-hit", "load-corrupt", "load-dma-fail", "ack-late")]


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("seed", [3, 42, 55, 60, 68, 73, 79])
def test_a_load_that_a_step_waits_for_and_that_fails_leaves_nothing_behind(seed: int, *, overlaps: bool) -> None:
    """The step sees how it ends, whatever becomes of the report; and what it has computed on it is not stored."""
    rng = Random(f"sync{seed}")
    layout = rng.choice(LAYOUTS)
    config = offloading(
        *layout,
        num_gpu_blocks=40,
        cpu_chunks=128,
        store_bytes_per_s=rng.choice([200, 2000]),
        load_bytes_per_s=rng.choice([200, 10**9]),
        sync_load_budget_bytes=64,
    )
    clients = some_clients(rng)
    faults = [f"{name}:p=0.7" for name in rng.sample(SYNC_FAULTS, 3)]
    config = overlapping(config) if overlaps else config
    played = play(config, clients, *faults, behaviour="ideal", recompute=True, seed=seed)
    assert not played.of("violation", "engine.crashed", "request.stalled")
