"""Cluster: two phases, proofs of stall, samples, and what it is told about itself."""

from dataclasses import replace

import pytest

from kvreplay.errors import ConfigError
from kvreplay.faults.plan import make_plan
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.replay.cluster import SAMPLE_NS, Cluster, path_timers_ns, topology_of
from kvreplay.replay.config import TopologyConfig
from tests.scenarios.stage import pair, play, request, single, workload

ONE = workload(request("a"))


class TestStalls:
    def test_who_waits_when_nothing_can_happen_any_more_is_proven_stalled(self) -> None:
        played = play(pair(), ONE, "timeout", behaviour="pre-50984")
        (stall,) = played.of("request.stalled")
        assert (stall.instance, stall.request_id, stall.status) == ("D0", "a", "WAITING_FOR_REMOTE_KVS")
        assert (stall.time_ns, stall.num_tokens) == (540_003 * NS_PER_MS, 1 * NS_PER_MS), "proven then, parked since"
        assert (stall.num_blocks, stall.peer, stall.transfer_id, stall.cause) == (2, "P0", "xfer-a", "remote KV")

    def test_who_ended_is_none(self) -> None:
        assert play(pair(), ONE).of("request.stalled") == []

    def test_samples_keep_no_run_alive(self) -> None:
        played = play(single(), ONE)
        assert played.cluster.loop.now_ns < NS_PER_S

    def test_nor_do_clients_who_would_have_given_up_what_is_over(self) -> None:
        played = play(single(), workload(request("a"), request("b"), aborts=[("a", 60_000), ("b", 5)]))
        assert played.cluster.loop.now_ns < NS_PER_S
        assert {event.request_id for event in played.of("request.aborted")} == {"b"}


class TestHealing:
    def test_the_dead_come_back(self) -> None:
        played = play(pair(), ONE, "peer-crash:at=5ms", behaviour="pre-50984")
        assert all(node.is_up for node in played.cluster.nodes)
        assert played.of("request.stalled"), "which does not help a request whose pull is over"

    def test_faults_end(self) -> None:
        played = play(pair(), ONE, "peer-crash:at=5ms")
        assert played.cluster.injector.kinds == frozenset()
        assert played.cluster.injector.num_held == 0


class TestSamples:
    def test_one_every_ten_seconds_and_one_at_the_end(self) -> None:
        late = workload(request("a"), request("b", 25_000))
        played = play(single(), late)
        times = sorted({event.time_ns for event in played.of("usage")})
        assert times == [SAMPLE_NS, 2 * SAMPLE_NS, 25_031 * NS_PER_MS]

    def test_those_that_repeat_the_last_are_left_out_after_ten_minutes(self) -> None:
        """Years of doing nothing cost nothing. They go on where something happens, at the times they had before."""
        year_ms = 365 * 24 * 3600 * 1000
        late = workload(request("a"), request("b", year_ms + 9_995), request("c", year_ms + 30_000))
        played = play(single(), late)
        times = sorted({event.time_ns for event in played.of("usage")})
        year = year_ms * NS_PER_MS
        assert times == [
            *range(SAMPLE_NS, 62 * SAMPLE_NS, SAMPLE_NS),
            *(year + SAMPLE_NS * number for number in (1, 2, 3)),
            played.cluster.loop.now_ns,
        ]
        assert played.cluster.loop.num_run < 1000
        in_use = {event.time_ns: event.num_tokens for event in played.of("usage") if event.status == "running"}
        assert in_use[year + SAMPLE_NS] == 1

    def test_those_that_are_not_even_taken_would_be_left_out(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hour_ms = 3_600_000
        late = workload(
            *(request(f"r{number}", at_ms) for number, at_ms in enumerate((0, hour_ms, 2 * hour_ms + 1, 9 * hour_ms)))
        )
        skipping = play(pair(), late, "timeout:nth=2")

        def sample_every_time(cluster: Cluster) -> None:
            cluster.ends.sample()
            cluster._sample_later()

        monkeypatch.setattr(Cluster, "_sample", sample_every_time)
        assert play(pair(), late, "timeout:nth=2").events == skipping.events

    def test_each_instance_that_is_up_has_its_own(self) -> None:
        late = workload(request("a"), request("b", 25_000))
        played = play(pair(), late, "peer-crash:at=15s,instance=P0,down=20s")
        sampled = {(event.time_ns // NS_PER_S, event.instance) for event in played.of("usage")}
        assert {(10, "P0"), (10, "D0"), (20, "D0")} <= sampled
        assert (20, "P0") not in sampled


class TestTopology:
    def test_what_a_plan_is_checked_against(self) -> None:
        config = replace(pair(), topology=TopologyConfig(prefill=2, decode=1))
        topology = topology_of(config, ONE)
        assert topology.instances == {"P0": "kv_producer", "P1": "kv_producer", "D0": "kv_consumer"}
        assert topology.connectors == frozenset({"mooncake"})
        assert topology.request_ids == ["a"]
        assert topology_of(single(), None).connectors == frozenset()

    @pytest.mark.parametrize(
        "fault", ["timeout", "peer-crash:instance=D0", "abort:request=z", "mooncake.engine-ret:group=3"]
    )
    def test_an_impossible_fault_is_refused_before_anything_happens(self, fault: str) -> None:
        make_plan([fault])
        with pytest.raises(ConfigError, match=rf"^--inject {fault.partition(':')[0]}"):
            play(single(), ONE, fault)


def test_a_parked_request_may_wait_for_every_timer_on_its_path() -> None:
    """Three bootstrap attempts of 30 s, and 540 s for a reply."""
    assert path_timers_ns(pair()) == (3 * 30 + 540) * NS_PER_S
    assert path_timers_ns(single()) == 0
