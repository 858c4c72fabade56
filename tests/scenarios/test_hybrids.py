"""Models of several KV cache groups in small clusters: what holds for one group holds for them."""

from collections import Counter
from unittest.mock import patch

import pytest
from hypothesis import given, settings

from kvreplay.kv.cache_manager import KVCacheManager
from kvreplay.replay.config import ReplayConfig
from tests.scenarios.hybrid_worlds import LAYOUTS, Groups, hybrid_worlds, with_groups
from tests.scenarios.random_worlds import PAIR_FAULTS, World
from tests.scenarios.stage import Play, play, request, role, single, workload
from tests.scenarios.test_properties import check_blocks, check_every_request_is_accounted_for, check_outputs


def found(played: Play) -> list[tuple[object, ...]]:
    return sorted(
        (event.status, event.instance, event.request_id, event.group, tuple(event.block_ids or ()))
        for event in played.violations
    )


@settings(max_examples=100, deadline=None)
@given(hybrid_worlds())
def test_without_a_connector_no_law_is_broken(world: World) -> None:
    """Aborts, preemptions and crashes leave nothing held, and nobody reads what is not there."""
    played = world.play()
    assert found(played) == []
    assert played.broken_laws() == []
    check_every_request_is_accounted_for(world, played)
    check_outputs(played)


@settings(max_examples=60, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS))
def test_under_any_fault_every_block_is_accounted_for(world: World) -> None:
    played = world.play()
    if not played.of("engine.crashed"):
        check_every_request_is_accounted_for(world, played)
    if all(event.status != "NULL-BLOCK" for event in played.violations):
        check_blocks(played)
        check_outputs(played)


@settings(max_examples=100, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=("ideal",)))
def test_ideal_violates_nothing_under_any_mix_of_faults(world: World) -> None:
    played = world.play()
    assert found(played) == []
    assert played.broken_laws() == []
    check_every_request_is_accounted_for(world, played)
    assert "stalled" not in {kind for kind, _, _ in played.ends().values()}
    check_outputs(played)


@settings(max_examples=40, deadline=None)
@given(hybrid_worlds())
def test_what_evictions_have_cost_is_found_without_looking_at_every_key(world: World) -> None:
    """What full attention never had behind a hit, no other group needs to be asked about."""
    with patch.object(KVCacheManager, "_ends_in_full_attention", return_value=False):
        thorough = world.play()
    told, expected = (played.of("tokens.recomputed") for played in (world.play(), thorough))
    assert told == expected


@settings(max_examples=60, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS))
def test_nothing_escapes_whoever_looks_only_where_something_changed(world: World) -> None:
    """Looking at every read finds the same."""
    assert found(world.with_kv(check="every-read").play()) == found(world.play())


@settings(max_examples=60, deadline=None)
@given(hybrid_worlds(max_faults=0, layouts=[LAYOUTS[name] for name in ("full and windows", "full and small blocks")]))
def test_evicted_blocks_are_counted_by_group(world: World) -> None:
    """Recounted from the blocks that get a hash and are then given to somebody else."""
    played = world.play()
    group_of: dict[int, int] = {}
    evicted: Counter[int] = Counter()
    for event in played.of("block.cached", "block.allocated"):
        for block_id in event.block_ids or ():
            if event.kind == "block.cached":
                group_of[block_id] = event.group or 0
            elif block_id in group_of:
                evicted[group_of.pop(block_id)] += 1
    told: Counter[int] = Counter()
    for event in played.of("block.evicted"):
        told[event.group or 0] += event.num_blocks or 0
    assert told == evicted


@settings(max_examples=100, deadline=None)
@given(hybrid_worlds())
def test_nothing_is_lost_to_evictions_where_nothing_was_evicted(world: World) -> None:
    played = world.play()
    if not played.of("block.evicted") and not played.of("engine.crashed"):
        assert "eviction" not in {event.cause for event in played.of("tokens.recomputed")}


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_a_block_that_is_changed_behind_its_back_is_found_when_it_is_hit(groups: Groups) -> None:
    """The first request's prompt is changed in the cache; the second hits it."""
    config = with_groups(single(role(num_gpu_blocks=100)), groups)
    twins = workload(
        request("a", prompt_tokens=25, output_tokens=2, text="abcdefg"),
        request("b", 500, prompt_tokens=25, output_tokens=2, text="abcdefg"),
    )
    assert play(config, twins).violations == []
    spoiled = _play_spoiled(config, twins)
    assert {(event.status, event.request_id) for event in spoiled.violations} >= {("CONTENT", "b")}


def _play_spoiled(config: ReplayConfig, clients: object) -> Play:
    from kvreplay.behaviour import profile
    from kvreplay.events import DETAIL_BLOCKS
    from kvreplay.faults.plan import make_plan
    from kvreplay.replay.cluster import Cluster, RunSettings
    from tests.list_sink import ListSink

    sink = ListSink(DETAIL_BLOCKS)
    settings = RunSettings(config=config, behaviour=profile("vllm-0.33"), recompute=False, plan=make_plan(()))
    cluster = Cluster(settings, clients, sink)  # type: ignore[arg-type] # a workload

    def spoil() -> None:
        model = cluster.nodes[0].instance._model
        assert model is not None
        model.buffers.words[1:] += 1

    cluster.loop.call_later(300_000_000, spoil)
    cluster.run()
    return Play(cluster, sink)
