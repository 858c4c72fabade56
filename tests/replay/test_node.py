"""Node: one instance of a cluster through crashes and restarts."""

from dataclasses import replace

import pytest

from kvreplay.replay.config import TopologyConfig
from kvreplay.replay.node import Node, instance_names
from kvreplay.sim.envelope import Command
from tests.scenarios.stage import Play, pair, play, request, single, workload

ONE = workload(request("a"))


def node(played: Play, name: str) -> Node:
    (found,) = (node for node in played.cluster.nodes if node.name == name)
    return found


def test_instances_are_named_by_their_role_and_number() -> None:
    config = replace(pair(), topology=TopologyConfig(prefill=2, decode=3))
    assert instance_names(config) == {
        "P0": "prefill",
        "P1": "prefill",
        "D0": "decode",
        "D1": "decode",
        "D2": "decode",
    }
    assert instance_names(single()) == {"E0": "engine"}


def test_roles_are_vllms() -> None:
    played = play(pair(), ONE)
    assert [node(played, name).kv_role for name in ("P0", "D0")] == ["kv_producer", "kv_consumer"]
    assert node(play(single(), ONE), "E0").kv_role == ""


class TestLife:
    def test_a_restart_brings_a_new_engine_id_and_empty_memory(self) -> None:
        played = play(single(), ONE, "peer-crash:at=60ms,down=10ms")
        restarted = node(played, "E0")
        assert (restarted.incarnation, restarted.engine_id) == (1, "E0#1")
        assert restarted.instance.scheduler.pool.num_cached_keys == 0

    def test_counters_go_on_through_it(self) -> None:
        """3 steps before, 3 after: 10 tokens each."""
        twice = workload(request("a"), request("b", 100))
        played = play(single(), twice, "peer-crash:at=60ms,down=10ms")
        last = {event.status: event.num_tokens for event in played.of("usage")}
        assert (last["steps"], last["computed_tokens"]) == (6, 20)

    def test_evictions_of_before_it_are_told(self) -> None:
        """32 blocks, four prompts of ten each: some lose their hashes before it goes down, and before any sample."""
        texts = ("abcdefghij", "klmnopqrst", "uvwxyzABCD", "EFGHIJKLMN")
        four = workload(
            *(request(text[0], 500 * place, text=text, prompt_tokens=40) for place, text in enumerate(texts))
        )
        untouched = sum(event.num_blocks or 0 for event in play(single(), four).of("block.evicted"))
        crashed = play(single(), four, "peer-crash:at=9s,down=10ms").of("block.evicted")
        assert sum(event.num_blocks or 0 for event in crashed) == untouched > 0

    def test_preemptions_too(self) -> None:
        played = play(single(), ONE, "scheduler.preempt", "peer-crash:at=45ms,down=10ms")
        last = {event.status: event.num_tokens for event in played.of("usage")}
        assert last["preemptions"] == 1

    def test_healing_brings_back_who_is_down(self) -> None:
        played = play(single(), ONE, "peer-crash:at=5ms")
        assert node(played, "E0").is_up
        assert node(played, "E0").incarnation == 1

    def test_a_dead_one_has_no_requests(self) -> None:
        played = play(single(), ONE)
        dead = node(played, "E0")
        assert dead.crash(Command("crash"))
        assert (dead.is_up, dead.num_requests) == (False, 0)
        assert not dead.crash(Command("crash"))

    def test_who_is_up_is_not_restarted(self) -> None:
        assert not node(play(single(), ONE), "E0").restart()


class TestCommands:
    @pytest.mark.parametrize("verb", ["preempt", "step-raises"])
    def test_a_dead_instance_obeys_none(self, verb: str) -> None:
        dead = node(play(single(), ONE), "E0")
        dead.crash(Command("crash"))
        assert not dead.command(Command(verb, {"request_id": "a"}))

    def test_who_does_not_run_is_not_preempted(self) -> None:
        assert not node(play(single(), ONE), "E0").command(Command("preempt", {"request_id": "a"}))

    def test_what_it_does_not_know_it_does_not_do(self) -> None:
        assert not node(play(single(), ONE), "E0").command(Command("dance"))

    def test_a_crash_names_its_victims(self) -> None:
        """Whoever was queued or running when it died."""
        played = play(single(), workload(request("a"), request("b", 3)), "peer-crash:at=5ms")
        assert [event.request_id for event in played.of("fault.injected")] == ["a", "b"]
