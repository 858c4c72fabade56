"""Public incidents of class N: peers that are gone, come back, or are of another kind."""

from dataclasses import replace

import pytest

from tests.incidents.clusters import crashes, how, laws
from tests.incidents.ticks import about, at, clients, ends, engines
from tests.scenarios.stage import Play, play


@pytest.mark.incident("N1")
class TestN1APeerThatWasDeadStaysDead:
    """nixl#1983, sglang#40108, vllm#55471, nixl#1159: two consumers, a request for each in every tick. What breaks, and
    what restarts, is a consumer, or the producer. A consumer that keeps what it knows of the producer before its
    restart is the pair that stays dead; `TestExternalBootstrapServer` has a producer that is not let in again."""

    BACK = 8

    def play(self, behaviour: str, *faults: str, timeout: float = 480) -> Play:
        base = engines(64, 64, abort_request_timeout=timeout, receive_timeout=timeout)
        config = replace(base, topology=replace(base.topology, decode=2))
        requests = clients(*(at(tick + place / 2, f"{tick:02}.{place}", 32) for tick in range(15) for place in (0, 1)))
        return play(config, requests, *faults, behaviour=behaviour)

    @staticmethod
    def lost(played: Play, consumer: int) -> list[int]:
        """Ticks of which a request of this consumer's was not served."""
        told = {name: kind for name, kind in how(played).items() if name and name.endswith(f".{consumer}")}
        assert len(told) == 15
        return [int(name.partition(".")[0]) for name, kind in sorted(told.items()) if kind != "finished"]

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("identity", ["new", "same"])
    def test_a_consumer_that_is_back_is_served_at_once(self, identity: str, behaviour: str) -> None:
        fault = f"engine.restart:instance=D0,at=5s,down=3s,identity={identity}"
        played = self.play(behaviour, fault)
        assert self.lost(played, 0) == [5, 6, 7]
        assert self.lost(played, 1) == []
        assert laws(played) == set()

    def test_a_producer_that_is_back_under_its_configured_id_is_not_found_again(self) -> None:
        """Both consumers go on to the ports of the process before, which they have cached under that id."""
        played = self.play("vllm-0.33", "engine.restart:instance=P0,at=5s,down=3s,identity=same", timeout=2)
        assert self.lost(played, 0) == self.lost(played, 1) == list(range(5, 15))
        assert laws(played) == set()

    @pytest.mark.parametrize(("identity", "behaviour"), [("new", "vllm-0.33"), ("new", "ideal"), ("same", "ideal")])
    def test_a_producer_that_is_back_is_found_again(self, identity: str, behaviour: str) -> None:
        """Both consumers ask its bootstrap server as soon as a request names the new process, or ideally as soon as
        nobody answers at the old address. The request of tick 8 was on its way when the producer came up: it names the
        old id, which is the new one where it is configured."""
        fault = f"engine.restart:instance=P0,at=5s,down=3s,identity={identity}"
        played = self.play(behaviour, fault, timeout=2)
        assert self.lost(played, 0) == [5, 6, 7] + [8] * (identity == "new")
        assert self.lost(played, 1) == [5, 6, 7]
        assert laws(played) == set()

    RESTART = "engine.restart:instance=P0,at=3s,down=1s,identity=new"
    STALE = "mooncake.bootstrap-stale-addr:instance=D0,nth=2"

    def test_one_pair_stays_dead(self) -> None:
        """D0 has been given the addresses of before, and asks nobody again."""
        played = self.play("vllm-0.33", self.RESTART, self.STALE, timeout=2)
        assert self.lost(played, 0) == list(range(3, 15))
        assert self.lost(played, 1) == [3]

    @pytest.mark.parametrize("behaviour", ["vllm-0.33 pull_wait=bounded", "ideal"])
    def test_what_fails_is_forgotten_and_asked_for_again(self, behaviour: str) -> None:
        """The request that has met the old address is lost, the next one is served."""
        played = self.play(behaviour, self.RESTART, self.STALE, timeout=2)
        assert self.lost(played, 0) == [3, 4, 5]
        assert self.lost(played, 1) == [3]
        assert laws(played) == set()


@pytest.mark.incident("N3")
class TestN3EachWaitsForTheOtherToMove:
    """vllm#50620, vllm#49230: the producer is there to push, the consumer to pull. Mooncake's have one mode; what comes
    of two is a consumer that parks its request and asks for nothing, or parameters that are meant for the other side,
    or a refusal at the pull, its handshake."""

    def play(self, behaviour: str, fault: str, *, recompute: bool = False) -> Play:
        config = engines(12, 12, abort_request_timeout=30)
        return play(config, clients(at(0, "R", 64)), fault, behaviour=behaviour, recompute=recompute)

    NOBODY_ASKS = "mooncake.missing-params:instance=D0"

    def test_nothing_is_ever_transferred(self) -> None:
        """The producer gives up after its 30 ticks, the consumer never."""
        played = self.play("vllm-0.33", self.NOBODY_ASKS)
        assert how(played) == {"R": "stalled"}
        assert played.of("pull.sent", "send.started") == []
        assert (played.num_free("P0"), played.num_free("D0")) == (12, 8)

    def test_ideally_it_is_served_without_a_transfer(self) -> None:
        played = self.play("ideal", self.NOBODY_ASKS)
        assert how(played) == {"R": "finished"}
        assert laws(played) == set()

    @pytest.mark.parametrize("instance", ["P0", "D0"])
    def test_what_is_meant_for_the_other_side_kills_an_engine(self, instance: str) -> None:
        played = self.play("vllm-0.33", f"mooncake.role-mismatch:instance={instance}")
        assert [name for name, _ in crashes(played)] == [instance]

    def test_ideally_it_ends_by_its_deadline(self) -> None:
        played = self.play("ideal", "mooncake.role-mismatch:instance=P0")
        assert ends(played)["R"] == about("failed", 30)
        assert [event.cause for event in played.of("request.failed")] == ["Timeout waiting for P side ready."]
        assert (laws(played), crashes(played)) == (set(), [])

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_compared_at_the_pull_it_is_refused_with_a_reason(self, behaviour: str, *, recompute: bool) -> None:
        fault = "mooncake.tp-mismatch:tp_size=1,tp_rank=1"
        played = self.play(behaviour, fault, recompute=recompute)
        assert ends(played)["R"] == about("finished" if recompute else "failed", 0)
        assert [event.cause for event in played.of("pull.settled")] == [
            "This D tp_rank 1 is not paired with P tp_rank 0; expected one of [0]."
        ]
        assert laws(played) == set()
