"""Steps may be skipped, results may not: the fast ways give the same events as the plain one."""

from collections.abc import Mapping
from typing import Any, Final

import pytest
from hypothesis import given, settings

from kvreplay.events import DETAIL_BLOCKS, DETAIL_RUN, DETAIL_STEPS, KINDS, Event
from tests.scenarios.random_worlds import ENGINE_FAULTS, PAIR_FAULTS, World, worlds
from tests.scenarios.stage import MAX_MODEL_LEN, Play, play, request, role, single, workload

PLAIN: Final[Mapping[str, bool]] = {"single_steps": True, "use_lockstep": False}
SINGLE_STEPS: Final[Mapping[str, bool]] = {"single_steps": True}
COASTING: Final[Mapping[str, bool]] = {}

EVERY_PROFILE: Final = ("vllm-0.33", "pre-50984", "post-50984", "ideal")

# What lockstep leaves out, or says later: it does not touch a request while nothing happens to it.
UNTOUCHED: Final = (
    "request.scheduled",  # of a request that decodes
    "block.cached",  # a block's hash is entered when somebody could look for it
    "lookup",  # who cannot have come to fit is not asked what it would load
)


def comparable(play: Play) -> list[Event]:
    """Its events with causes in words, since their places depend on what is left out."""
    return [_with_cause(event, play) for event in play.events if event.kind not in UNTOUCHED]


def _with_cause(event: Event, play: Play) -> Event:
    if event.cause_handle is None:
        return event._replace(prefix_hashes=None)
    cause = play.events[event.cause_handle]
    return event._replace(cause_handle=None, peer=str((event.peer, cause.kind, cause.time_ns, cause.request_id)))


def pools(play: Play) -> list[object]:
    """Each instance's pool at the end: the free queue in order, and what the prefix cache holds."""
    states: list[object] = []
    for node in play.cluster.nodes:
        pool = node.instance.scheduler.pool
        states.append(
            (
                node.name,
                pool.free_queue().tolist(),
                pool.keys.tolist(),
                pool.ref_counts.tolist(),
                pool.find(pool.keys.clip(0)).tolist(),
                pool.num_cached_keys,
                pool.num_evicted,
            )
        )
    return states


def check_modes(world: World) -> None:
    plain = world.play(**PLAIN)
    expected = comparable(plain)
    for mode in (SINGLE_STEPS, COASTING):
        play = world.play(**mode)
        assert comparable(play) == expected
        if all(node.is_up for node in play.cluster.nodes):
            assert pools(play) == pools(plain)


def check_details(world: World) -> None:
    """What is written must not decide what happens; finer levels only add rows."""
    finest = world.play(detail=DETAIL_BLOCKS)
    for detail in (DETAIL_RUN, DETAIL_STEPS):
        play = world.play(detail=detail)
        assert without_handles(play, detail) == without_handles(finest, detail)
        assert pools(play) == pools(finest)


def without_handles(play: Play, detail: int) -> list[Event]:
    return [
        event._replace(cause_handle=None, prefix_hashes=None)
        for event in play.events
        if KINDS[event.kind].detail <= detail
    ]


@settings(max_examples=100, deadline=None)
@given(worlds(faults=ENGINE_FAULTS))
def test_one_engine_gives_the_same_events_in_every_mode(world: World) -> None:
    check_modes(world)


@settings(max_examples=100, deadline=None)
@given(worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=EVERY_PROFILE))
def test_a_pair_gives_the_same_events_in_every_mode(world: World) -> None:
    check_modes(world)


def test_twins_that_fill_a_block_in_a_coast_hash_it_in_their_order() -> None:
    """The one that is preempted right after must not come first in the cache: it would hit its own block again."""
    twins = [request(name, prompt_tokens=3, output_tokens=3, text="a") for name in ("r0", "r1")]
    config = single(role(num_gpu_blocks=18, max_num_seqs=2))
    for seed in range(4):  # it takes one of the two
        fault = "scheduler.preempt:at=request.first_token,p=0.5"
        check_modes(World(config, workload(*twins), (fault,), "vllm-0.33", recompute=False, seed=seed))


def test_a_whole_prompt_that_finds_no_budget_comes_in_the_next_step() -> None:
    """Not after all the steps in which the others decode."""
    prompts = [request(name, prompt_tokens=40, output_tokens=12, text=name * 10) for name in "ab"]
    engine = role(num_gpu_blocks=200, max_num_batched_tokens=MAX_MODEL_LEN, enable_chunked_prefill=False)
    check_modes(World(single(engine), workload(*prompts), (), "vllm-0.33", recompute=False, seed=0))


@pytest.mark.parametrize("is_pair", [False, True])
def test_what_is_written_does_not_decide_what_happens(is_pair: bool) -> None:
    @settings(max_examples=50, deadline=None)
    @given(worlds(is_pair=is_pair, faults=PAIR_FAULTS if is_pair else ENGINE_FAULTS, behaviours=EVERY_PROFILE))
    def check(world: World) -> None:
        check_details(world)

    check()


class TestEveryRead:
    """Contents are verified when they enter a table or are written by others; no wrong read may escape that."""

    @settings(max_examples=100, deadline=None)
    @given(worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=EVERY_PROFILE, max_faults=3))
    def test_verifying_every_read_finds_nothing_more(self, world: World) -> None:
        expected = comparable(world.play())
        for mode in (COASTING, PLAIN):
            assert comparable(world.with_kv(check="every-read").play(**mode)) == expected

    @settings(max_examples=30, deadline=None)
    @given(worlds(is_pair=True, faults=PAIR_FAULTS, behaviours=EVERY_PROFILE))
    def test_without_contents_all_else_is_the_same(self, world: World) -> None:
        def unread(play: Play) -> list[Event]:
            return [event._replace(output_hash=None) for event in comparable(play) if event.kind != "violation"]

        assert unread(world.with_kv(check="off").play()) == unread(world.play())


def test_the_modes_differ() -> None:
    """Else nothing was compared: in one, many steps are a single action of the loop."""
    actions: dict[str, int] = {}
    modes: dict[str, Mapping[str, Any]] = {"plain": PLAIN, "single": SINGLE_STEPS, "coasting": COASTING}
    for name, mode in modes.items():
        done = play(single(), workload(request("a", output_tokens=40)), **mode)
        actions[name] = done.cluster.loop.num_run
    assert actions["plain"] == actions["single"] > 40 > actions["coasting"]
