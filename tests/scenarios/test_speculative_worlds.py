"""Random clusters that speculate: what holds for one token a step holds for several."""

from hypothesis import given, settings

from tests.scenarios.hybrid_worlds import hybrid_worlds
from tests.scenarios.random_worlds import ENGINE_FAULTS, PAIR_FAULTS, World, worlds
from tests.scenarios.speculative_worlds import speculating
from tests.scenarios.test_hybrids import found
from tests.scenarios.test_properties import check_blocks, check_every_request_is_accounted_for, check_outputs


@settings(max_examples=60, deadline=None)
@given(speculating(worlds(faults=ENGINE_FAULTS)))
def test_one_engine_breaks_no_law(world: World) -> None:
    played = world.play()
    assert found(played) == []
    assert not played.of("engine.crashed")
    check_every_request_is_accounted_for(world, played)
    check_outputs(played)


@settings(max_examples=60, deadline=None)
@given(speculating(hybrid_worlds()))
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
