"""Windows, states and several groups: the fast ways give the same events as the plain one."""

from hypothesis import given, settings

from tests.engine.test_modes import COASTING, PLAIN, check_details, check_modes, comparable
from tests.scenarios.hybrid_worlds import hybrid_worlds
from tests.scenarios.random_worlds import PAIR_FAULTS, World


@settings(max_examples=120, deadline=None)
@given(hybrid_worlds())
def test_one_engine_gives_the_same_events_in_every_mode(world: World) -> None:
    check_modes(world)


@settings(max_examples=60, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=("vllm-0.33", "ideal")))
def test_a_pair_gives_the_same_events_in_every_mode(world: World) -> None:
    check_modes(world)


@settings(max_examples=60, deadline=None)
@given(hybrid_worlds())
def test_what_is_written_does_not_decide_what_happens(world: World) -> None:
    check_details(world)


@settings(max_examples=60, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=("vllm-0.33", "ideal")))
def test_verifying_every_read_finds_nothing_more(world: World) -> None:
    expected = comparable(world.play())
    for mode in (COASTING, PLAIN):
        assert comparable(world.with_kv(check="every-read").play(**mode)) == expected
