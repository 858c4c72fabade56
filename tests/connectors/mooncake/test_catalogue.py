"""The catalogue's rows about ranks, writes that are not atomic, and the listener: the symptom, and the recovery."""

from kvreplay.behaviour import Behaviour, profile
from kvreplay.connectors.mooncake.catalogue.ranks import PEERS
from kvreplay.faults.injector import Injector
from kvreplay.faults.plan import make_plan
from kvreplay.faults.topology import TopologyInfo
from tests.connectors.mooncake.engines import Engines, Sizes
from tests.connectors.mooncake.pair import Pair, behaviour, request_for

TOPOLOGY = TopologyInfo(instances={"P0": "kv_producer", "D0": "kv_consumer"}, connectors=frozenset({"mooncake"}))
IDEAL = profile("ideal")
TARGETS = (4, 5, 6)


def ranks(spec: str, producer: Sizes, consumer: Sizes, switches: Behaviour | None = None) -> Engines:
    """Engines of these sizes and one pull, with a fault, after all is over."""
    engines = Engines(producer, consumer, switches=switches)
    injector = Injector(make_plan([spec]), 0, engines.sink, engines.loop, engines.bus)
    injector.arm(TOPOLOGY)
    engines.finish()
    engines.pull()
    engines.run()
    (statistics,) = injector.statistics()
    assert statistics.fired, "it must have been there to be survived"
    return engines


def pair(spec: str, switches: Behaviour | None = None) -> Pair:
    played = Pair(switches)
    injector = Injector(make_plan([spec]), 0, played.sink, played.loop, played.bus)
    injector.arm(TOPOLOGY)
    played.finish([1, 3, 5])
    played.pull()
    played.run(1)
    assert injector.statistics()[0].fired == 1
    return played


def settled_at(engines: Engines) -> list[float]:
    return [event.time_ns / 1e9 for event in engines.sink.events if event.kind == "pull.settled"]


class TestOneOfSeveralPeers:
    def test_one_failure_is_reported_and_completion_waits_for_the_other(self) -> None:
        for order, times in (("first", [0.0, 0.0]), ("last", [0.0, 5.0])):
            engines = ranks(f"mooncake.peer-one-of-k:order={order}", (2, 1), (1, 1))
            assert engines.d.invalid() == [[4, 5, 6]]
            assert engines.d.finished() == ["d1"]
            assert settled_at(engines) == times

    def test_in_50984_it_is_complete_at_once(self) -> None:
        engines = Engines((2, 1), (1, 1), switches=behaviour(mooncake_failure="report"))
        injector = Injector(make_plan(["mooncake.peer-one-of-k"]), 0, engines.sink, engines.loop, engines.bus)
        injector.arm(TOPOLOGY)
        engines.pull()
        engines.run(1)
        assert engines.d.finished() == ["d1"], "though the other peer may still write"

    def test_before_it_is_never_complete(self) -> None:
        engines = ranks("mooncake.peer-one-of-k", (2, 1), (1, 1), behaviour(mooncake_failure="silent"))
        assert engines.d.reports == []

    def test_silence_costs_the_receive_timeout(self) -> None:
        engines = ranks("mooncake.peer-silent-one-of-k", (2, 1), (1, 1))
        assert max(settled_at(engines)) == 540.0
        assert engines.d.invalid() == [[4, 5, 6]]

    def test_with_one_peer_there_is_nothing_to_choose(self) -> None:
        played = Pair()
        injector = Injector(make_plan(["mooncake.peer-one-of-k"]), 0, played.sink, played.loop, played.bus)
        injector.arm(TOPOLOGY)
        played.finish()
        played.pull()
        played.run()
        assert injector.statistics()[0].fired == 0


class TestBootstrapAnswers:
    def test_without_the_last_rank_a_half_is_missing_and_nobody_says_so(self) -> None:
        engines = ranks("mooncake.bootstrap-partial-ranks", (2, 1), (1, 1))
        assert (engines.d.finished(), engines.d.invalid()) == (["d1"], [])
        assert engines.d.memory.wrong_tokens(*TARGETS) == list(range(12))

    def test_without_the_first_the_pull_is_lost(self) -> None:
        engines = ranks("mooncake.bootstrap-partial-ranks:which=first", (2, 1), (1, 1))
        assert engines.d.reports == []

    def test_ideally_the_request_fails(self) -> None:
        for which in ("first", "last"):
            engines = ranks(f"mooncake.bootstrap-partial-ranks:which={which}", (2, 1), (1, 1), IDEAL)
            assert (engines.d.finished(), engines.d.invalid()) == (["d1"], [[4, 5, 6]])

    def test_a_stale_address_costs_the_receive_timeout(self) -> None:
        assert settled_at(ranks("mooncake.bootstrap-stale-addr", (1, 1), (1, 1))) == [540.0]

    def test_ideally_it_is_noticed(self) -> None:
        assert settled_at(ranks("mooncake.bootstrap-stale-addr", (1, 1), (1, 1), IDEAL)) == [0.0]

    def test_a_dead_bootstrap_address_is_that_of_its_whole_batch(self) -> None:
        (row,) = [row for row in PEERS if row.name == "mooncake.mixed-bootstrap-addr"]
        assert row.rewrite is not None
        params = row.rewrite({"transfer_id": "X0", "remote_bootstrap_addr": "http://P0:8998"}, {})
        played = Pair()
        played.pull(request_for("d0", bootstrap=params["remote_bootstrap_addr"]), request_for("d1"))
        played.run()
        assert [status for _, status, _ in played.settled()] == ["failed", "failed"]


class TestWrites:
    def test_bytes_of_a_failed_call_land_late(self) -> None:
        played = pair("mooncake.engine-late")
        assert played.settled() == [("d1", "failed", "Mooncake transfer engine returned -1")]
        assert played.d_memory.blocks == {}
        played.run(60)
        assert played.d_memory.block(5) == played.p_memory.block(3)

    def test_ideally_they_are_refused(self) -> None:
        played = pair("mooncake.engine-late", IDEAL)
        played.run(60)
        assert played.d_memory.blocks == {}

    def test_some_of_them_in_time(self) -> None:
        played = pair("mooncake.engine-late:landed=2")
        assert sorted(block for _, block in played.d_memory.blocks) == [4, 5]

    def test_a_successful_call_may_not_have_landed_yet(self) -> None:
        played = pair("mooncake.engine-late:ret=0")
        assert played.settled() == [("d1", "ok", None)]
        assert played.d_memory.blocks == {}
        assert pair("mooncake.engine-late:ret=0", IDEAL).settled()[0][1] == "failed"

    def test_a_raising_call_is_an_error(self) -> None:
        played = pair("mooncake.engine-raise:message=no")
        assert played.settled() == [("d1", "failed", "no")]
        played.run()
        assert played.reports_of("P0") == []

    def test_ideally_the_blocks_expire(self) -> None:
        played = pair("mooncake.engine-raise", IDEAL)
        played.run()
        assert [finished for _, finished, _, _ in played.reports_of("P0")] == [["p1"]]


class TestTheListener:
    def test_it_answers_nobody_any_more(self) -> None:
        played = pair("mooncake.listener-dead:nth=1")
        played.finish([1], p_req_id="p2", transfer_id="X2")
        played.pull(request_for("d2", blocks=[[7]]))
        played.run()
        assert {cause for _, _, cause in played.settled()} == {"transfer failed: Resource temporarily unavailable"}

    def test_ideally_it_does_not_care(self) -> None:
        assert pair("mooncake.listener-dead", IDEAL).settled() == [("d1", "ok", None)]


class TestRanks:
    def test_a_silent_one(self) -> None:
        engines = ranks("mooncake.rank-silent:nth=1", (1, 1), (2, 1))
        assert (engines.p.finished(), engines.d.finished()) == (["p1"], [])
        assert ranks("mooncake.rank-silent:nth=1", (1, 1), (2, 1), IDEAL).d.finished() == ["d1"]

    def test_a_late_one(self) -> None:
        engines = ranks("mooncake.rank-late:nth=1,delay=7s", (1, 1), (2, 1))
        assert (engines.d.finished(), engines.d.reports_at) == (["d1"], [7 * 10**9])

    def test_one_that_reports_twice(self) -> None:
        for switches, times in ((None, 2), (IDEAL, 1)):
            engines = Engines((1, 1), (2, 1), switches=switches)
            injector = Injector(
                make_plan(["mooncake.rank-duplicate", "mooncake.resp-delayed:delay=9s,nth=1"]),
                0,
                engines.sink,
                engines.loop,
                engines.bus,
            )
            injector.arm(TOPOLOGY)
            engines.finish()
            engines.pull()
            engines.run()
            assert engines.d.finished() == ["d1"] * times

    def test_one_that_is_reported_early(self) -> None:
        for switches, time_s in ((None, 0), (IDEAL, 9)):
            engines = Engines((1, 1), (2, 1), switches=switches)
            specs = ["mooncake.rank-early:nth=1", "mooncake.resp-delayed:delay=9s,nth=1"]
            injector = Injector(make_plan(specs), 0, engines.sink, engines.loop, engines.bus)
            injector.arm(TOPOLOGY)
            engines.finish()
            engines.pull()
            engines.run()
            assert engines.d.reports_at[0] == time_s * 10**9
