"""What must hold in any small cluster under any faults: things end, blocks come back, runs repeat."""

from dataclasses import replace
from typing import Final

from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.connectors.mooncake.config import MooncakeConfig
from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.registry import VERBS
from kvreplay.faults.verb import MessageVerb
from kvreplay.ids import NS_PER_MS
from kvreplay.replay.sampler import expected_output_hash
from kvreplay.sim.envelope import BOOTSTRAP_REGISTER
from tests.scenarios.random_worlds import ENGINE_FAULTS, World, pair_configs, workloads, worlds
from tests.scenarios.random_worlds import MESSAGE_FAULTS as KNOWN_FAULTS
from tests.scenarios.stage import LINK_MS, Play, role

EVERY_PROFILE: Final = ("vllm-0.33", "pre-50984", "post-50984", "ideal")

MESSAGE_FAULTS: Final = tuple(
    f"{name}:p=0.4"
    for name, row in catalogue().items()
    if row.needs == "mooncake" and isinstance(VERBS[row.verb], MessageVerb) and row.target != BOOTSTRAP_REGISTER
)
"""Of what happens to an instance that is up."""
NAMING_FAULTS: Final = tuple(fault for fault in KNOWN_FAULTS if not fault.startswith("mooncake.missing-params"))
"""Those that name everyone they harm. (Who pulls later from an address that was cached wrong, or from a dead listener,
is not named: mooncake.bootstrap-stale-addr, mooncake.listener-dead.)"""
FAULTS: Final = (
    *MESSAGE_FAULTS,
    "mooncake.missing-params:p=0.3,instance=D*",
    "abort:p=0.3",
    "abort:p=0.3,when=running",
    "abort:p=0.3,when=queued",
    "scheduler.preempt:p=0.5",
    "peer-crash:at=30ms,instance=P0,down=1s",
    "peer-crash:at=45ms,instance=D0,down=1s",
    "peer-crash:at=20ms,instance=P*",
    "peer-crash:at=pull.sent,instance=D0,nth=2",
    "engine.restart:at=40ms,instance=P0",
)


@st.composite
def clusters(
    draw: st.DrawFn, *, behaviours: tuple[str, ...] = EVERY_PROFILE, faults: tuple[str, ...] = FAULTS
) -> World:
    """Up to two producers and two consumers, up to four faults at once."""
    return World(
        draw(pair_configs(max_instances=2)),
        draw(workloads()),
        tuple(draw(st.lists(st.sampled_from(faults), max_size=4, unique=True))),
        draw(st.sampled_from(behaviours)),
        draw(st.booleans()),
        draw(st.integers(0, 3)),
    )


def crashed(played: Play) -> set[str | None]:
    return {event.instance for event in played.of("engine.crashed")}


def check_every_request_is_accounted_for(world: World, played: Play) -> None:
    """Each ends, or is proven stalled, once for its client."""
    ends = played.ends()
    assert set(ends) == {arrival.request_id for arrival in world.workload.arrivals}
    kinds = ("request.finished", "request.failed", "request.aborted", "request.rejected")
    by_leg = [(event.instance, event.request_id) for event in played.of(*kinds) if event.instance is not None]
    assert len(by_leg) == len(set(by_leg))


def check_blocks(played: Play) -> None:
    """Free and held are all; what is held at the end is a stalled request's, or one that no report has released."""
    structural = [
        event for event in played.violations if event.status == "CONSERVATION" and "still held" not in str(event.cause)
    ]
    assert structural == []
    assert [event for event in played.violations if event.status == "NULL-BLOCK"] == []
    leaked = {
        (event.instance, event.request_id)
        for event in played.violations
        if event.status == "CONSERVATION" and "still held" in str(event.cause)
    }
    for node in played.cluster.nodes:
        if node.is_up:
            scheduler = node.instance.scheduler
            held = scheduler.pool.num_blocks - 1 - scheduler.pool.num_free
            assert bool(held) == any(instance == node.name for instance, _ in leaked)


def check_outputs(played: Play) -> None:
    """Right contents give right outputs: only who has a finding behind it may have another."""
    if any(event.status in ("CONTENT", "FENCE") for event in played.violations):
        return
    places = {event.request_id: place for place, event in enumerate(played.of("request.arrived"))}
    for event in played.of("request.finished"):
        assert event.num_tokens is not None
        content = played.cluster.index.content(places[event.request_id])
        assert event.output_hash == expected_output_hash(content, event.num_tokens), event


def check_aborts(played: Play) -> None:
    """Who is aborted gets nothing any more once the abort has reached the engine."""
    ends = played.ends()
    for event in played.of("request.aborted"):
        if event.instance is None:
            kind, _, end_ms = ends[event.request_id]
            assert kind != "finished" or end_ms <= event.time_ns / NS_PER_MS + LINK_MS, event


@settings(max_examples=150, deadline=None)
@given(clusters())
def test_everything_ends_and_every_block_is_accounted_for(world: World) -> None:
    played = world.play()
    if not crashed(played):
        check_every_request_is_accounted_for(world, played)
    check_blocks(played)
    check_outputs(played)
    check_aborts(played)


@settings(max_examples=150, deadline=None)
@given(clusters(behaviours=("ideal",)))
def test_ideal_violates_nothing_under_any_mix_of_faults(world: World) -> None:
    """Everything is terminal, no law is broken, all blocks are back."""
    played = world.play()
    check_every_request_is_accounted_for(world, played)
    assert "stalled" not in {kind for kind, _, _ in played.ends().values()}
    assert played.violations == []
    assert played.broken_laws() == []
    assert crashed(played) == set()
    for node in played.cluster.nodes:
        pool = node.instance.scheduler.pool
        assert pool.num_free == pool.num_blocks - 1
    check_outputs(played)


@settings(max_examples=80, deadline=None)
@given(clusters(behaviours=("vllm-0.33",), faults=NAMING_FAULTS))
def test_under_fail_only_the_faulted_fail_and_under_recompute_nobody_does(world: World) -> None:
    """Where there is room for all: else who waits behind a faulted load's blocks may find its own prefill expired."""
    ample = role(num_gpu_blocks=400, max_num_seqs=16)
    played = replace(world, config=replace(world.config, roles=dict.fromkeys(world.config.roles, ample))).play()
    if crashed(played):
        return
    failed = {event.request_id for event in played.of("request.failed")}
    named = {event.request_id for event in played.of("fault.injected")}
    # A consumer that gives up before the producer does also gives up on one whose blocks the faulted still hold.
    if world.config.connector.mooncake == MooncakeConfig():
        assert failed <= named
    if world.recompute:
        assert failed == set()


@settings(max_examples=60, deadline=None)
@given(worlds(faults=ENGINE_FAULTS))
def test_one_engine_ends_everything_and_gives_every_block_back(world: World) -> None:
    played = world.play()
    check_every_request_is_accounted_for(world, played)
    check_blocks(played)
    check_outputs(played)
    check_aborts(played)
    assert played.violations == []


@settings(max_examples=40, deadline=None)
@given(clusters())
def test_a_run_repeats_event_for_event(world: World) -> None:
    first, second = world.play(), world.play()
    assert [event._replace(prefix_hashes=None) for event in first.events] == [
        event._replace(prefix_hashes=None) for event in second.events
    ]


@settings(max_examples=40, deadline=None)
@given(clusters(), st.integers(4, 9))
def test_without_chance_the_seed_makes_no_difference(world: World, seed: int) -> None:
    certain = World(world.config, world.workload, (), world.behaviour, world.recompute, world.seed)
    assert certain.play().story() == certain.play(seed=seed).story()
