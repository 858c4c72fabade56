"""Models of several KV cache groups in small clusters: what holds for one group holds for them.

Mamba blocks of a budget's multiple, windows and chunks of a few blocks, groups with other block sizes over one pool.
"""

from dataclasses import replace
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.kv.specs import (
    CHUNKED_LOCAL,
    FULL,
    MAMBA,
    MAMBA_ALIGN,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
)
from kvreplay.replay.config import ReplayConfig, RoleConfig
from tests.scenarios.random_worlds import ENGINE_FAULTS, PAIR_FAULTS, World, pair_configs, workloads
from tests.scenarios.stage import MAX_MODEL_LEN, TIMING, UNEVEN_TIMING, Play, play, request, role, single, workload
from tests.scenarios.test_properties import check_blocks, check_every_request_is_accounted_for, check_outputs

Groups = tuple[KVCacheGroupSpec, ...]

_FULL = KVCacheGroupSpec(kind=FULL, block_size=4, bytes_per_token=2)
_WINDOW = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=10, bytes_per_token=2)
_SMALL_BLOCKS = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=2, sliding_window=6, bytes_per_token=4)
_STATE = KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode=MAMBA_ALIGN, state_bytes=8)

LAYOUTS: Final[dict[str, Groups]] = {
    "full and windows": (_FULL, _WINDOW, _WINDOW),
    "windows only": (_WINDOW, KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=6, bytes_per_token=2)),
    "full and small blocks": (_FULL, _SMALL_BLOCKS),
    "full and states": (_FULL, _STATE, _STATE),
    "full and chunks": (
        _FULL,
        KVCacheGroupSpec(kind=CHUNKED_LOCAL, block_size=4, attention_chunk_size=8, bytes_per_token=2),
    ),
    "full, windows and states": (_FULL, _WINDOW, _STATE),
    "compressed": (
        KVCacheGroupSpec(kind=MLA, block_size=8, tokens_per_state=4, bytes_per_token=1),
        KVCacheGroupSpec(kind=SLIDING_WINDOW_MLA, block_size=2, sliding_window=4, bytes_per_token=4),
        KVCacheGroupSpec(kind=SLIDING_WINDOW_MLA, block_size=4, sliding_window=8, bytes_per_token=2),
    ),
}


def with_groups(config: ReplayConfig, groups: Groups) -> ReplayConfig:
    return replace(config, model=replace(config.model, groups=groups))


@st.composite
def roomy(draw: st.DrawFn, groups: Groups) -> RoleConfig:
    """A pool that holds the longest request, and little more."""
    budget = draw(st.sampled_from([8, 16, 32]))
    needed = sum(group.max_blocks(budget, MAX_MODEL_LEN) for group in groups)
    return role(
        num_gpu_blocks=needed + 1 + draw(st.sampled_from([0, 2, 5, 12, 40])),
        timing=draw(st.sampled_from([TIMING, UNEVEN_TIMING])),
        max_num_batched_tokens=budget,
        max_num_seqs=draw(st.sampled_from([2, 4, 8])),
    )


@st.composite
def worlds(
    draw: st.DrawFn,
    *,
    is_pair: bool = False,
    faults: tuple[str, ...] = ENGINE_FAULTS,
    behaviours: tuple[str, ...] = ("vllm-0.33",),
    max_faults: int = 3,
) -> World:
    groups = draw(st.sampled_from(list(LAYOUTS.values())))
    config = draw(pair_configs()) if is_pair else single()
    roles = {name: draw(roomy(groups)) for name in config.roles}
    return World(
        replace(config, model=replace(config.model, groups=groups), roles=roles),
        draw(workloads()),
        tuple(draw(st.lists(st.sampled_from(faults), max_size=max_faults, unique=True))),
        draw(st.sampled_from(behaviours)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )


def found(played: Play) -> list[tuple[object, ...]]:
    return sorted(
        (event.status, event.instance, event.request_id, event.group, tuple(event.block_ids or ()))
        for event in played.violations
    )


@settings(max_examples=100, deadline=None)
@given(worlds())
def test_without_a_connector_no_law_is_broken(world: World) -> None:
    """Aborts, preemptions and crashes leave nothing held, and nobody reads what is not there."""
    played = world.play()
    assert found(played) == []
    check_every_request_is_accounted_for(world, played)
    check_outputs(played)


@settings(max_examples=60, deadline=None)
@given(worlds(is_pair=True, faults=PAIR_FAULTS))
def test_under_any_fault_every_block_is_accounted_for(world: World) -> None:
    played = world.play()
    if not played.of("engine.crashed"):
        check_every_request_is_accounted_for(world, played)
    if all(event.status != "NULL-BLOCK" for event in played.violations):
        check_blocks(played)
        check_outputs(played)


@settings(max_examples=100, deadline=None)
@given(worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=("ideal",)))
def test_ideal_violates_nothing_under_any_mix_of_faults(world: World) -> None:
    played = world.play()
    assert found(played) == []
    check_every_request_is_accounted_for(world, played)
    assert "stalled" not in {kind for kind, _, _ in played.ends().values()}
    check_outputs(played)


@settings(max_examples=60, deadline=None)
@given(worlds(is_pair=True, faults=PAIR_FAULTS))
def test_nothing_escapes_whoever_looks_only_where_something_changed(world: World) -> None:
    """Looking at every read finds the same."""
    assert found(world.with_kv(check="every-read").play()) == found(world.play())


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
    from kvreplay.events import DETAIL_BLOCKS, ListSink
    from kvreplay.faults.plan import make_plan
    from kvreplay.replay.cluster import Cluster, RunSettings

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
