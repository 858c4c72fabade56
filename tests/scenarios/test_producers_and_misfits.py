"""Faults of a producer's leg, of two sides that do not go together, and of starts: symptoms and recovery."""

from dataclasses import replace
from pathlib import Path

import pytest

from kvreplay.errors import ConfigError
from kvreplay.ids import NS_PER_MS
from kvreplay.trace.workload import Workload
from tests.scenarios.stage import Play, judge, pair, play, request, role, workload

ONE = workload(request("a"))
TWO = workload(request("a"), request("b"))
LATER = workload(request("a"), request("b", 100))
LONG = workload(request("a", prompt_tokens=60))
GENERATIONS = ("pre-50984", "post-50984", "vllm-0.33")
NEVER_READY = "Timeout waiting for P side ready."
NOT_FOUND = "remote engine_id P0#0 not found from bootstrap server http://P0:8998"


def ends_of(fault: str, requests: Workload = ONE, *, steps_of: int = 32) -> list[tuple[str, float]]:
    """How the first request ends in each generation, under `fail`, and ideally under `recompute`; and when, in ms."""
    config = pair(prefill=role(max_num_batched_tokens=steps_of))
    plays = [play(config, requests, fault, behaviour=name) for name in GENERATIONS]
    plays.append(ideal := play(config, requests, fault, behaviour="ideal", recompute=True))
    assert ideal.violations == []
    assert [len(node.instance.request_ids) for node in ideal.cluster.nodes] == [0, 0]
    return [(played.ends()["a"][0], played.ends()["a"][2]) for played in plays]


def reasons(played: Play) -> list[str | None]:
    return [event.cause for event in played.of("request.failed", instance="D0")]


@pytest.mark.parametrize(
    ("fault", "requests", "ends", "reason"),
    [
        (
            "mooncake.p-never-ready",
            ONE,
            [("stalled", 480_005), ("failed", 480_005), ("failed", 480_005), ("finished", 480_036)],
            NEVER_READY,
        ),
        (
            "mooncake.p-slow-prefill",
            ONE,
            [("stalled", 980_012), ("failed", 480_005), ("failed", 480_005), ("finished", 480_036)],
            NEVER_READY,
        ),
        (
            "mooncake.p-expire-before-pull",
            ONE,
            [("stalled", 980_005), ("failed", 540_003), ("failed", 540_003), ("finished", 500_036)],
            "transfer failed: Resource temporarily unavailable",
        ),
        (
            "mooncake.p-stop-token",
            ONE,
            [("stalled", 480_005), ("failed", 480_005), ("failed", 480_005), ("finished", 46)],
            NEVER_READY,
        ),
        (
            "mooncake.p-abort-while-waiting",
            LONG,
            [("stalled", 480_005), ("failed", 480_005), ("failed", 480_005), ("finished", 63)],
            NEVER_READY,
        ),
        (
            "mooncake.tp-mismatch",
            ONE,
            [("stalled", 480_012), ("failed", 5), ("failed", 5), ("finished", 36)],
            "Mooncake source KV region length does not match the consumer TP ratio at region 0: local=4, remote=4, "
            "tp_ratio=-3.",
        ),
        (
            "mooncake.tp-mismatch:tp_size=1,tp_rank=1",
            ONE,
            [("stalled", 480_012), ("failed", 5), ("failed", 5), ("finished", 36)],
            "This D tp_rank 1 is not paired with P tp_rank 0; expected one of [0].",
        ),
        (
            "mooncake.group-mismatch",
            ONE,
            [("stalled", 480_012), ("failed", 12), ("failed", 12), ("finished", 43)],
            "KV group count mismatch",
        ),
        (
            "mooncake.blocks-short",
            ONE,
            [("stalled", 480_012), ("failed", 12), ("failed", 12), ("finished", 43)],
            "P num blocks less than D",
        ),
    ],
)
def test_one_request_in_each_generation(
    fault: str, requests: Workload, ends: list[tuple[str, float]], reason: str
) -> None:
    steps_of = 8 if requests is LONG else 32
    assert ends_of(fault, requests, steps_of=steps_of) == ends
    config = pair(prefill=role(max_num_batched_tokens=steps_of))
    assert reasons(play(config, requests, fault)) == [reason]


class TestSharedTransferId:
    FAULT = "mooncake.dup-transfer-id"

    def test_at_once_one_gets_the_others_blocks_and_a_producers_stay_held(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), TWO, self.FAULT)
        assert sorted({found.checker for found in summary.violations}) == ["CONSERVATION", "CONTENT"]
        assert {found.fault for found in summary.violations} == {self.FAULT}

    def test_ideally_neither_is_sent(self) -> None:
        played = play(pair(), TWO, self.FAULT, behaviour="ideal", recompute=True)
        assert {name: end[0] for name, end in played.ends().items()} == {"a": "finished", "b": "finished"}
        assert played.violations == []
        assert played.of("send.started") == []

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_one_after_the_other_is_no_harm(self, behaviour: str) -> None:
        played = play(pair(), LATER, self.FAULT, behaviour=behaviour)
        assert {end[0] for end in played.ends().values()} == {"finished"}
        assert played.violations == []


class TestRoleMismatch:
    @pytest.mark.parametrize("instance", ["P0", "D0"])
    def test_the_engine_dies(self, instance: str, tmp_path: Path) -> None:
        summary = judge(tmp_path, pair(), ONE, f"mooncake.role-mismatch:instance={instance}")
        assert summary.verdict == "crashed"
        assert [(crash.instance, crash.exception) for crash in summary.crashes] == [(instance, "AssertionError")]

    @pytest.mark.parametrize(("instance", "at_ms"), [("P0", 480_036), ("D0", 31)])
    def test_ideally_it_is_served_without_a_transfer(self, instance: str, at_ms: int) -> None:
        fault = f"mooncake.role-mismatch:instance={instance}"
        played = play(pair(), ONE, fault, behaviour="ideal", recompute=True)
        assert played.ends() == {"a": ("finished", "D0", at_ms)}
        assert played.violations == []

    def test_the_producers_leg_is_still_the_one_that_never_arrives(self) -> None:
        faults = ("mooncake.role-mismatch", "mooncake.p-never-ready")
        played = play(pair(), ONE, *faults, behaviour="ideal", recompute=True)
        assert played.ends() == {"a": ("finished", "D0", 31)}
        assert played.violations == []


class TestSaturation:
    """Pulls of strangers come with that of `a`; `b` comes later."""

    FAULT = "mooncake.queue-saturation:request=a"

    def test_everybody_waits_for_strangers(self) -> None:
        ends = play(pair(), LATER, self.FAULT).ends()
        assert ends == {"a": ("finished", "D0", 480_039), "b": ("finished", "D0", 480_039)}

    def test_fewer_than_there_are_sender_tasks_are_no_harm(self) -> None:
        assert play(pair(), LATER, f"{self.FAULT},pulls=19").ends()["b"] == ("finished", "D0", 146)

    def test_ideally_who_only_waits_keeps_nobody_from_being_served(self) -> None:
        ends = play(pair(), LATER, self.FAULT, behaviour="ideal").ends()
        assert ends == {"a": ("finished", "D0", 46), "b": ("finished", "D0", 146)}


class TestExternalBootstrapServer:
    """`bootstrap_server_address`: one server for all producers, each with a data-parallel rank of its own."""

    CONFIG = replace(
        pair(bootstrap_server_address="boot:9000"),
        topology=replace(pair().topology, prefill=2),
    )
    TURNS = workload(*(request(f"r{place}", place * 200) for place in range(8)))
    RESTART = "peer-crash:instance=P0,at=300ms,down=100ms"

    def test_one_answer_tells_of_all_producers(self) -> None:
        played = play(self.CONFIG, self.TURNS)
        assert {end[0] for end in played.ends().values()} == {"finished"}
        assert len(played.of("bootstrap.queried")) == 1

    def test_it_refuses_a_producer_that_comes_back(self) -> None:
        played = play(self.CONFIG, self.TURNS, self.RESTART)
        crash, after_healing = played.of("engine.crashed")
        assert (crash.instance, crash.time_ns) == ("P0", 400 * NS_PER_MS)
        for event in (crash, after_healing):
            assert event.status == "HTTPStatusError"
            assert event.cause == "Client error '400 Bad Request' for url 'http://boot:9000/register'"

    def test_ideally_it_takes_the_place_that_it_had(self) -> None:
        played = play(self.CONFIG, self.TURNS, self.RESTART, behaviour="ideal", recompute=True)
        assert played.of("engine.crashed") == []
        assert played.violations == []
        assert {end[0] for end in played.ends().values()} == {"finished"}

    @pytest.mark.parametrize("address", ["boot", "boot:", ":9000", "http://boot:1", "a/b:1"])
    def test_what_is_no_address(self, address: str) -> None:
        with pytest.raises(ConfigError, match=r"^connector\.bootstrap_server_address must be HOST:PORT, got "):
            pair(bootstrap_server_address=address)


class TestStarts:
    @pytest.mark.parametrize(
        ("fault", "exception", "at_ms"),
        [
            ("mooncake.register-conflict", "HTTPStatusError", 0),
            ("mooncake.register-timeout", "RuntimeError", 93_000),
            ("mooncake.engine-init", "RuntimeError", 0),
            ("mooncake.register-mem", "RuntimeError", 0),
        ],
    )
    def test_a_producer_that_never_comes_up(self, fault: str, exception: str, at_ms: int) -> None:
        assert [end[0] for end in ends_of(fault)] == ["stalled", "failed", "failed", "finished"]
        played = play(pair(), ONE, fault)
        crashes = [(event.instance, event.status, event.time_ns / 1e6) for event in played.of("engine.crashed")]
        assert crashes == [("P0", exception, at_ms)]
        assert reasons(played) == [NOT_FOUND]

    def test_a_producer_whose_first_registration_is_lost_comes_up_late(self) -> None:
        played = play(pair(), LATER, "mooncake.register-timeout:times=1", behaviour="ideal")
        assert played.of("engine.crashed") == []
        assert reasons(played) == [NOT_FOUND, NOT_FOUND]
        late = workload(request("a", 31_500))
        assert play(pair(), late, "mooncake.register-timeout:times=1").ends()["a"] == ("finished", "D0", 31_546)

    def test_every_rank_registers(self) -> None:
        played = play(pair(ranks=((2, 2), (1, 1))), ONE, "mooncake.register-conflict:rank=3")
        (crash,) = played.of("engine.crashed")
        assert (crash.instance, crash.status, crash.time_ns) == ("P0", "HTTPStatusError", 0)
        assert crash.cause == "Client error '400 Bad Request' for url 'http://P0:8998/register'"

    def test_a_consumer_that_never_comes_up_refuses_its_clients(self) -> None:
        played = play(pair(), ONE, "mooncake.engine-init:instance=D0", behaviour="ideal")
        assert played.ends()["a"][0] == "rejected"
        assert [event.cause for event in played.of("request.rejected")] == ["connection refused"]

    def test_healing_starts_it_again(self) -> None:
        played = play(pair(), ONE, "mooncake.register-mem")
        assert [node.is_up for node in played.cluster.nodes] == [True, True]

    def test_a_consumer_registers_nowhere(self) -> None:
        with pytest.raises(ConfigError, match="instance=D0 matches no instance, expected P0"):
            play(pair(), ONE, "mooncake.register-conflict:instance=D0")
