"""Steps that overlap: the next is scheduled while one runs. 10 ms a step, a message takes 1 ms."""

from typing import Final

from hypothesis import given, settings

from kvreplay.kv.specs import KVCacheGroupSpec
from tests.scenarios.hybrid_worlds import LAYOUTS, hybrid_worlds
from tests.scenarios.random_worlds import ENGINE_FAULTS, PAIR_FAULTS, World
from tests.scenarios.stage import Play, pair, play, request, role, single, workload
from tests.scenarios.test_properties import check_every_request_is_accounted_for, check_outputs

ONE_GROUP: Final = (KVCacheGroupSpec(block_size=4, bytes_per_token=2),)
EVERY_LAYOUT: Final = (ONE_GROUP, *LAYOUTS.values())


def steps(played: Play, instance: str = "E0") -> list[tuple[float, int | None]]:
    """(ms at which its forward pass starts, tokens) of each step."""
    return [(row[0], row[-1]) for row in played.log("step", instance=instance, columns=["num_tokens"])]


def first_tokens(played: Play) -> dict[str | None, float]:
    return {row[3]: row[0] for row in played.log("request.first_token")}


def overlapping() -> Play:
    requests = workload(request("a", output_tokens=4), request("b", 12, output_tokens=2))
    return play(single(role(async_scheduling=True)), requests)


def test_who_arrives_during_a_step_waits_for_the_one_that_is_scheduled_already() -> None:
    """At 11 the step from 21 on is scheduled; b comes at 13, is scheduled at 21 and computed from 31 on."""
    assert first_tokens(overlapping()) == {"a": 11, "b": 41}
    alone = play(single(), workload(request("a", output_tokens=4), request("b", 12, output_tokens=2)))
    assert first_tokens(alone) == {"a": 11, "b": 31}


def test_forward_passes_follow_each_other_without_a_gap() -> None:
    assert steps(overlapping()) == [(1, 8), (11, 1), (21, 1), (31, 9), (41, 1)]


def test_both_end_with_their_outputs_and_nothing_is_held() -> None:
    played = overlapping()
    assert {name: end[0] for name, end in played.ends().items()} == {"a": "finished", "b": "finished"}
    assert played.violations == []
    assert played.num_free("E0") == 32


def test_an_abort_takes_effect_at_the_end_of_the_step_in_which_it_comes() -> None:
    requests = workload(request("a", output_tokens=20), aborts=[("a", 33)])
    played = play(single(role(async_scheduling=True)), requests)
    assert played.ends() == {"a": ("aborted", "E0", 41)}
    assert played.num_free("E0") == 32


def test_a_parked_load_wakes_the_consumer() -> None:
    consumer = role(async_scheduling=True)
    played = play(pair(prefill=role(async_scheduling=True), decode=consumer), workload(request("a", output_tokens=3)))
    assert played.ends()["a"][0] == "finished"
    assert played.violations == []


def test_a_crash_takes_both_steps_along() -> None:
    requests = workload(request("a", output_tokens=20))
    played = play(single(role(async_scheduling=True)), requests, "engine.step-raises:at=25ms")
    assert played.ends()["a"][0] == "failed"
    (crash,) = played.of("engine.crashed")
    assert (crash.time_ns, crash.status) == (31_000_000, "RuntimeError")


@settings(max_examples=100, deadline=None)
@given(hybrid_worlds(faults=ENGINE_FAULTS, layouts=EVERY_LAYOUT, overlaps=True))
def test_without_a_connector_no_law_is_broken(world: World) -> None:
    played = world.play()
    assert played.violations == []
    check_every_request_is_accounted_for(world, played)
    check_outputs(played)


@settings(max_examples=100, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=("ideal",), layouts=EVERY_LAYOUT, overlaps=True))
def test_ideal_violates_nothing_under_any_mix_of_faults(world: World) -> None:
    played = world.play()
    assert played.violations == []
    check_every_request_is_accounted_for(world, played)
    assert "stalled" not in {kind for kind, _, _ in played.ends().values()}
    check_outputs(played)


@settings(max_examples=40, deadline=None)
@given(hybrid_worlds(is_pair=True, faults=PAIR_FAULTS, layouts=EVERY_LAYOUT, overlaps=True))
def test_a_run_repeats(world: World) -> None:
    assert world.play().events == world.play().events
