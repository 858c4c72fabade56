"""Proxy and clients: who gets which request, what a pair is told, and what a client hears."""

from dataclasses import replace

import pytest

from kvreplay.ids import NS_PER_MS
from kvreplay.replay.cluster import RunSettings
from kvreplay.replay.config import ReplayConfig, Routing, TopologyConfig
from kvreplay.sim.envelope import Command
from tests.scenarios.stage import Play, pair, play, request, single, workload


def cluster_of(prefill: int, decode: int, *, p: Routing = "round_robin", d: Routing = "round_robin") -> ReplayConfig:
    topology = TopologyConfig(prefill=prefill, decode=decode, proxy_prefill=p, proxy_decode=d)
    return replace(pair(), topology=topology)


def routes(played: Play) -> list[tuple[str | None, str | None, str | None]]:
    """(request, who serves it, who prefills it) in order."""
    return [(event.request_id, event.peer, event.instance) for event in played.of("request.routed")]


class TestPicking:
    FOUR = workload(*(request(name, 500 * place) for place, name in enumerate("abcd")))

    def test_round_robin_for_producers_and_consumers_each_on_its_own(self) -> None:
        assert routes(play(cluster_of(2, 3), self.FOUR)) == [
            ("a", "P0", "D0"),
            ("b", "P1", "D1"),
            ("c", "P0", "D2"),
            ("d", "P1", "D0"),
        ]

    def test_engines_that_serve_whole_requests_have_no_producer(self) -> None:
        config = replace(single(), topology=TopologyConfig(instances=2))
        assert routes(play(config, self.FOUR)) == [
            ("a", None, "E0"),
            ("b", None, "E1"),
            ("c", None, "E0"),
            ("d", None, "E1"),
        ]

    def test_least_loaded_is_the_one_with_the_fewest_unfinished_requests(self) -> None:
        """a and b run long; c goes where b is, since b is shorter; d finds both with two and takes the first."""
        config = replace(single(), topology=TopologyConfig(instances=2, proxy_decode="least_loaded"))
        clients = workload(
            request("a", output_tokens=30),
            request("b", 5, output_tokens=10),
            request("c", 200, output_tokens=9),
            request("d", 205),
        )
        assert routes(play(config, clients)) == [
            ("a", None, "E0"),
            ("b", None, "E1"),
            ("c", None, "E1"),
            ("d", None, "E0"),
        ]

    def test_producers_are_picked_by_their_own_load(self) -> None:
        """P0 has the long prompt until 21; D is picked in turn."""
        clients = workload(request("a", prompt_tokens=40), request("b", 15), request("c", 40))
        assert [row[1] for row in routes(play(cluster_of(2, 2, p="least_loaded"), clients))] == ["P0", "P1", "P0"]


class TestLegs:
    def test_both_are_sent_at_once_the_producers_with_one_output_token(self) -> None:
        played = play(pair(), workload(request("a", 7, output_tokens=9)))
        assert played.log("lookup", instance="P0")[0][0] == played.log("lookup", instance="D0")[0][0] == 8
        assert {event.instance: event.num_tokens for event in played.of("request.finished")} == {"P0": 1, "D0": 9}

    def test_they_share_a_transfer_id(self) -> None:
        played = play(pair(), workload(request("a")))
        transfers = {event.transfer_id for event in played.of("request.finished", "pull.sent", "request.routed")}
        assert transfers == {"xfer-a"}

    def test_the_consumer_is_told_who_computes_and_where_to_ask(self) -> None:
        """As it was when the request was routed: a restart in between makes it wrong."""
        played = play(cluster_of(2, 1), workload(request("a"), request("b")))
        asked = [(event.request_id, event.peer) for event in played.of("bootstrap.queried")]
        assert asked == [("a", "P0"), ("b", "P1")]


class TestClients:
    def test_an_abort_is_told_to_the_serving_instance_only(self) -> None:
        played = play(pair(), workload(request("a"), aborts=[("a", 5)]))
        assert played.ends() == {"a": ("aborted", "D0", 6)}
        assert played.log("request.finished") == [(11, "request.finished", "P0", "a")]

    @pytest.mark.parametrize("switches", ["", " proxy_failed_prefill=cancel"])
    def test_or_to_the_producer_as_well(self, switches: str) -> None:
        """Once: that it ends the request there is no failure that the client must hear of."""
        behaviour = f"vllm-0.33 proxy_abort=both{switches}"
        played = play(pair(), workload(request("a"), aborts=[("a", 5)]), behaviour=behaviour)
        assert played.log("request.aborted") == [
            (5, "request.aborted", None, "a"),
            (6, "request.aborted", "D0", "a"),
            (11, "request.aborted", "P0", "a"),
        ]
        assert played.of("request.finished") == []

    def test_an_abort_after_the_end_is_not_made(self) -> None:
        played = play(single(), workload(request("a", output_tokens=1), aborts=[("a", 11.5)]))
        assert played.of("request.aborted") == []

    def test_a_refused_connection_is_a_rejection(self) -> None:
        played = play(single(), workload(request("a", 20)), "peer-crash:at=10ms")
        assert played.log("request.rejected", columns=["cause"]) == [
            (21, "request.rejected", "E0", "a", "connection refused")
        ]

    def test_a_dead_producer_is_not_missed_by_the_proxy(self) -> None:
        played = play(pair(), workload(request("a", 20)), "peer-crash:at=10ms", recompute=True)
        assert played.ends()["a"][0] == "finished"

    def test_every_end_counts_once(self) -> None:
        clients = workload(request("a"), request("b"), request("c", 500), aborts=[("b", 3)])
        played = play(pair(), clients, "peer-crash:at=400ms,instance=D0")
        assert played.cluster.proxy.num_ended == 3

    @pytest.mark.parametrize("verb", ["abort", "crash"])
    def test_an_action_on_a_client_without_a_request_does_nothing(self, verb: str) -> None:
        played = play(single(), workload(request("a")))
        assert not played.cluster.bus.command("client", Command(verb, {"request_id": "a"}))

    def test_nothing_happens_before_its_time(self) -> None:
        played = play(single(), workload(request("a", 12.5)))
        assert played.events[0].kind == "request.arrived"
        assert played.events[0].time_ns == 12.5 * NS_PER_MS


def test_a_cluster_plays_its_settings_once() -> None:
    """They are frozen: one run cannot change another's."""
    assert RunSettings.__dataclass_params__.frozen  # type: ignore[attr-defined]
