"""Random clusters that speculate: what holds for one token a step holds for several."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.engine.config import SpeculativeConfig
from kvreplay.ids import NS_PER_MS
from kvreplay.replay.config import ReplayConfig
from kvreplay.trace.workload import Workload
from tests.scenarios.hybrid_worlds import hybrid_worlds
from tests.scenarios.offload_stage import offloading
from tests.scenarios.random_worlds import ENGINE_FAULTS, PAIR_FAULTS, World, worlds
from tests.scenarios.speculative_worlds import drafters, speculating, with_drafts, without_drafts
from tests.scenarios.stage import play, request, workload
from tests.scenarios.test_hybrids import found
from tests.scenarios.test_offload_worlds import a_config, overlapping, some_clients, some_faults
from tests.scenarios.test_properties import check_blocks, check_every_request_is_accounted_for, check_outputs


@settings(max_examples=60, deadline=None)
@given(speculating(worlds(faults=ENGINE_FAULTS)))
def test_one_engine_breaks_no_law(world: World) -> None:
    played = world.play()
    assert found(played) == []
    assert not played.of("engine.crashed")
    check_every_request_is_accounted_for(world, played)
    check_outputs(played)


MENDED = "vllm-0.33 aligned_lookahead=progress block_estimates=exact offload_promotions=request"
"""Without the hazards of 0.33 that have nothing to do with what is drawn here: chunks that end as none, estimates of
blocks that are too low, promotions that evict each other."""


@settings(max_examples=60, deadline=None)
@given(speculating(hybrid_worlds(behaviours=(MENDED,))))
def test_nor_does_one_with_several_groups(world: World) -> None:
    played = world.play()
    assert found(played) == []
    check_every_request_is_accounted_for(world, played)
    check_outputs(played)


@settings(max_examples=60, deadline=None)
@given(speculating(worlds(is_pair=True, faults=PAIR_FAULTS)))
def test_under_any_fault_every_block_is_accounted_for(world: World) -> None:
    played = world.play()
    if not played.of("engine.crashed"):
        check_every_request_is_accounted_for(world, played)
    check_blocks(played)
    check_outputs(played)


@settings(max_examples=60, deadline=None)
@given(speculating(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=("ideal",))))
def test_ideal_violates_nothing_under_any_mix_of_faults(world: World) -> None:
    played = world.play()
    assert found(played) == []
    check_every_request_is_accounted_for(world, played)
    assert "stalled" not in {kind for kind, _, _ in played.ends().values()}
    check_outputs(played)


@settings(max_examples=40, deadline=None)
@given(speculating(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS)))
def test_nothing_escapes_whoever_looks_only_where_something_changed(world: World) -> None:
    """Looking at every read finds the same."""
    assert found(world.with_kv(check="every-read").play()) == found(world.play())


@st.composite
def tiered(draw: st.DrawFn) -> tuple[ReplayConfig, Workload, list[str], int]:
    """An engine with a CPU tier that speculates, with clients and faults."""
    seed = draw(st.integers(0, 1 << 20))
    rng = Random(seed)
    config, has_tier = a_config(rng)
    clients, faults = some_clients(rng), some_faults(rng, has_tier=has_tier)
    config = with_drafts(config, draw(drafters(config.model.groups)))
    return overlapping(config) if draw(st.integers(0, 3)) == 3 else config, clients, faults, seed


@settings(max_examples=60, deadline=None)
@given(tiered(), st.booleans())
def test_with_a_cpu_tier_ideal_is_worth_the_name(
    world: tuple[ReplayConfig, Workload, list[str], int],
    recompute: bool,
) -> None:
    config, clients, faults, seed = world
    played = play(config, clients, *faults, behaviour="ideal", recompute=recompute, seed=seed)
    assert not played.of("violation", "engine.crashed", "request.stalled")
    outputs = {event.request_id: event.output_hash for event in played.of("request.finished")}
    for event in play(without_drafts(config), clients, behaviour="ideal").of("request.finished"):
        assert outputs.get(event.request_id, event.output_hash) == event.output_hash


@settings(max_examples=60, deadline=None)
@given(tiered())
def test_with_a_cpu_tier_0_33_breaks_no_law_without_faults(
    world: tuple[ReplayConfig, Workload, list[str], int],
) -> None:
    config, clients, _, _ = world
    played = play(config, clients, behaviour=MENDED)
    assert not played.of("violation", "engine.crashed", "request.stalled")


def test_less_than_a_chunk_beyond_what_the_gpu_holds_is_no_hit_withheld() -> None:
    """The GPU has the first half of a chunk, which the tier has whole: to load the other half is not worth it."""
    rng = Random(2158)
    config, _ = a_config(rng)
    config = with_drafts(config, SpeculativeConfig(num_speculative_tokens=1, method="eagle", draft_pass_ns=1_000_003))
    played = play(config, some_clients(rng), behaviour=MENDED)
    assert not played.of("violation")


def test_a_search_that_is_given_up_withholds_nothing() -> None:
    """What `c` could hit is being loaded for `b` by a copy that hangs: it waits for 5 s, and computes its prompt."""
    config = with_drafts(offloading(num_gpu_blocks=40), SpeculativeConfig(num_speculative_tokens=1, method="mtp"))
    at_ms = {"a": 0, "b": 400, "c": 410}
    clients = workload(*(request(name, at, prompt_tokens=20, text="abcde") for name, at in at_ms.items()))
    played = play(config, clients, "cache.reset:at=300ms,what=gpu", "offload.copy-hang:request=b", behaviour="ideal")
    assert not played.of("violation")
    (first_token,) = played.of("request.first_token", request_id="c")
    assert 5_410 < first_token.time_ns / NS_PER_MS < 5_450


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("seed", "method", "num_drafts", "overlaps"),
    [
        (10185, "ngram", 2, True),  # a step was in flight when the load of the one before it was found to have failed
        (12148, "eagle", 3, False),  # the event is lost that says that a load failed, for which its step waits
    ],
)
def test_ideally_no_load_that_a_step_waits_for_fails_unseen(
    seed: int, method: str, num_drafts: int, *, overlaps: bool, recompute: bool
) -> None:
    rng = Random(seed)
    config, has_tier = a_config(rng)
    clients, faults = some_clients(rng), some_faults(rng, has_tier=has_tier)
    speculative = SpeculativeConfig(num_speculative_tokens=num_drafts, method=method, draft_pass_ns=1_000_003)
    config = with_drafts(config, speculative)
    config = overlapping(config) if overlaps else config
    played = play(config, clients, *faults, behaviour="ideal", recompute=recompute, seed=seed)
    assert not played.of("violation", "engine.crashed", "request.stalled")
