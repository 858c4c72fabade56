"""Windows, states and several groups: the fast ways give the same events as the plain one."""

from typing import Any

from hypothesis import given, settings

from tests.engine.test_modes import COASTING, PLAIN, check_details, check_modes, comparable
from tests.scenarios.hybrid_worlds import LAYOUTS, hybrid_worlds, with_groups
from tests.scenarios.random_worlds import PAIR_FAULTS, World
from tests.scenarios.stage import pair, request, role, workload


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


def test_whoever_leaves_lockstep_with_another_has_been_looked_at_before() -> None:
    """`twin0` shares the first block of `r0`, into which a write lands late: both read it, and it is reported once.
    The state that `twin0` goes on from is right: not to be taken for that of the step in which this comes out."""
    tight = role(num_gpu_blocks=21, max_num_batched_tokens=8, max_num_seqs=2)
    timeouts: dict[str, Any] = {"abort_request_timeout": 0.05, "receive_timeout": 0.02, "transfer_timeout": 0.01}
    config = pair(prefill=tight, decode=tight, **timeouts)
    requests = workload(
        request("r0", prompt_tokens=5, output_tokens=4, text="xy"),
        request("r1", prompt_tokens=1, output_tokens=1),
        request("r2", prompt_tokens=1, output_tokens=1),
        request("twin0", prompt_tokens=5, output_tokens=4, text="xy"),
        request("r3", 3, prompt_tokens=1, output_tokens=1),
        request("r4", 3, prompt_tokens=1, output_tokens=1),
    )
    config = with_groups(config, LAYOUTS["full and states"])
    world = World(config, requests, ("slow:p=0.5,delay=50ms",), "vllm-0.33", recompute=True, seed=3)
    check_modes(world)
    wrong = [event.request_id for event in world.play().violations if event.status == "CONTENT"]
    assert wrong == ["r0"] * 4
