"""Public incidents in which blocks of ended requests are kept, and never or too late given back (kind C).

Times are ticks; see `ticks`. P's blocks are those of a prefill that is over: its request has ended for everybody else.
"""

from typing import Any

import pytest

from kvreplay.ids import NS_PER_S
from tests.incidents.clusters import how
from tests.incidents.scripted import Outcome, engine, request
from tests.incidents.ticks import at, clients, ends, engines, laws, ticks_of, usable
from tests.scenarios.stage import Play, play

BEHAVIOURS = pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])


def freed_by(played: Play, instance: str) -> float:
    """The tick at which the last blocks came back."""
    return max(event.time_ns for event in played.of("block.freed", instance=instance)) / NS_PER_S


@pytest.mark.incident("C1")
class TestC1NobodyComesToReadThem:
    """vllm#20139, vllm#21753, vllm#41383: 12 blocks on P, of which R1 and R2 have 4 each; R3 needs 6, and comes at 5.
    There is no D from the start on."""

    REQUESTS = clients(at(1, "R1", 64), at(2, "R2", 64), at(5, "R3", 96))
    NO_CONSUMER = "peer-crash:at=0s,instance=D0"

    @BEHAVIOURS
    @pytest.mark.parametrize("tp", [1, 2])
    def test_each_has_its_time(self, behaviour: str, tp: int) -> None:
        """Of two ranks both must have given up the blocks, and both forget them."""
        config = engines(12, 64, ranks=((tp, 1), (tp, 1)), abort_request_timeout=30)
        played = play(config, self.REQUESTS, self.NO_CONSUMER, behaviour=behaviour)
        expired = ticks_of(played, "send.expired")
        assert expired == {"R1": pytest.approx(31, abs=0.1), "R2": pytest.approx(32, abs=0.1), "R3": expired["R3"]}
        assert ticks_of(played, "request.first_token", "P0")["R3"] == pytest.approx(31, abs=0.1)
        assert (laws(played), played.num_free("P0")) == (set(), 12)

    def test_without_a_time_the_producer_is_full(self) -> None:
        """As before the fix: a million ticks are none."""
        config = engines(12, 64, abort_request_timeout=1e6)
        played = play(config, self.REQUESTS, self.NO_CONSUMER)
        assert ticks_of(played, "request.first_token", "P0")["R3"] > 1e6

    @BEHAVIOURS
    def test_nor_does_it_hear_of_an_abort_if_the_message_is_lost(self, behaviour: str) -> None:
        """D asks for none of the blocks, so that P lets go of them. Ideally P hears of the client itself, too."""
        config = engines(12, 64, abort_request_timeout=30)
        told = play(config, self.REQUESTS, "abort:when=queued,request=R1", behaviour=behaviour)
        assert told.of("send.expired") == []
        faults = ("abort:when=queued,request=R1", "mooncake.release-only-fail:request=R1")
        untold = play(config, self.REQUESTS, *faults, behaviour=behaviour)
        expired = {} if behaviour == "ideal" else {"R1": pytest.approx(31, abs=0.1)}
        assert ticks_of(untold, "send.expired") == expired
        assert untold.num_free("P0") == 12


@pytest.mark.incident("C3")
class TestC3OneOfSeveralChildrenIsPulled:
    """dynamo#14018, vllm#43509: six parents with two children each, one per tick. A prompt is 64 tokens, which the
    children share: 4 of P's 16 blocks."""

    CHILDREN = clients(
        *(
            at(parent, f"p{parent}.{child}", 64, text=[f"{parent}/{place}" for place in range(16)])
            for parent in range(6)
            for child in "ab"
        )
    )
    CONFIG = engines(16, 64, abort_request_timeout=30)
    GROUPS = tuple(f"mooncake.dup-transfer-id:transfer=t{parent},request=p{parent}.*" for parent in range(6))
    """Children have the transfer id of their parent, as they have its parameters."""

    def test_a_sibling_that_is_served_from_the_prefix_cache_is_never_asked_for(self) -> None:
        """NIXL's case: each child's blocks are its own to give back, and D asks for those of the first alone. From the
        fifth parent on there is no room on P until 30 ticks are over."""
        fault = "mooncake.missing-params:instance=D0,request=*.b"
        played = play(self.CONFIG, self.CHILDREN, fault, behaviour="vllm-0.33 mooncake_missing_params=prefill")
        assert set(how(played).values()) == {"finished"}
        assert sorted(name or "" for name in ticks_of(played, "send.expired")) == [f"p{place}.b" for place in range(6)]
        assert min(ticks_of(played, "send.expired").values()) == pytest.approx(30, abs=0.1)
        assert ends(played)["p4.a"][1] > 30

    def test_children_of_one_transfer_are_not_all_given_back(self) -> None:
        """Mooncake's case: some go with their time, and some never."""
        played = play(self.CONFIG, self.CHILDREN, *self.GROUPS, recompute=True)
        assert laws(played) == {"CONSERVATION"}
        assert {(event.instance, event.cause) for event in played.violations} == {
            ("P0", "4 blocks still held at the end")
        }

    def test_ideally_they_are_when_the_first_is_asked_for(self) -> None:
        """The last comes at 5. None is sent: which one's blocks are meant cannot be told."""
        played = play(self.CONFIG, self.CHILDREN, *self.GROUPS, behaviour="ideal", recompute=True)
        assert set(how(played).values()) == {"finished"}
        assert played.of("send.expired") == []
        assert freed_by(played, "P0") < 7
        assert (laws(played), played.num_free("P0")) == (set(), 16)


@pytest.mark.incident("C5")
class TestC5AClientThatLeavesTearsTheTransfer:
    """dynamo#7489: four requests, all of P's 16 blocks; each client leaves while its blocks are on their way."""

    CONFIG = engines(usable(16, step_ms=1_000), 64, abort_request_timeout=7)
    REQUESTS = clients(*(at(place / 10, f"R{place}", 64) for place in range(4)))
    LEAVES = "abort:delay=1s"

    def test_a_send_that_breaks_is_being_sent_for_ever(self) -> None:
        """Which has no time to be up: P can serve nobody any more. The verdict lists the four."""
        played = play(self.CONFIG, self.REQUESTS, self.LEAVES, "mooncake.engine-raise")
        assert set(how(played).values()) == {"aborted"}
        leaked = [(event.status, event.instance, event.request_id) for event in played.violations]
        assert leaked == [("CONSERVATION", "P0", f"R{place}") for place in range(4)]
        assert (played.num_free("P0"), played.num_free("D0")) == (0, 64)

    def test_ideally_it_has_its_time_like_any_other(self) -> None:
        played = play(self.CONFIG, self.REQUESTS, self.LEAVES, "mooncake.engine-raise", behaviour="ideal")
        assert freed_by(played, "P0") < 10
        assert (laws(played), played.num_free("P0"), played.num_free("D0")) == (set(), 16, 64)

    @BEHAVIOURS
    def test_a_transfer_that_may_end_gives_them_back_at_once(self, behaviour: str) -> None:
        """It takes three ticks from 2 on at the latest, with nobody there for it any more. Ideally those that come
        then have been dropped by P."""
        played = play(self.CONFIG, self.REQUESTS, self.LEAVES, "mooncake.engine-slow:delay=3s", behaviour=behaviour)
        assert set(how(played).values()) == {"aborted"}
        assert freed_by(played, "P0") == pytest.approx(4 if behaviour == "ideal" else 5, abs=0.1)
        assert played.of("send.expired") == []
        assert (laws(played), played.num_free("P0"), played.num_free("D0")) == (set(), 16, 64)


@pytest.mark.incident("C6")
class TestC6AFailureThatIsNotCountedDown:
    """vllm#43742: 9 blocks on P. What is being sent is counted up before, and down after the call, which raises for R1,
    of 4 blocks; R3 needs 6. A send is the store connector's put."""

    CONFIG = engines(usable(9, max_model_len=100), 64, abort_request_timeout=1.5)
    REQUESTS = clients(at(1, "R1", 64), at(2, "R2", 64), at(4, "R3", 90))
    FAULT = "mooncake.engine-raise:request=R1"

    def test_its_blocks_are_lost_and_who_needs_them_waits_for_ever(self) -> None:
        played = play(self.CONFIG, self.REQUESTS, self.FAULT, recompute=True)
        assert laws(played) == {"CONSERVATION", "stall"}
        assert [(event.instance, event.request_id) for event in played.of("request.stalled")] == [("P0", "R3")]
        assert [event.cause for event in played.of("request.stalled")] == ["free blocks"]
        assert played.num_free("P0") == 9 - 4

    def test_counted_down_whatever_happens_they_come_back(self) -> None:
        played = play(self.CONFIG, self.REQUESTS, self.FAULT, recompute=True, behaviour="ideal")
        assert ticks_of(played, "request.first_token", "P0")["R3"] < 5
        assert set(how(played).values()) == {"finished"}
        assert (laws(played), played.num_free("P0")) == (set(), 9)


@pytest.mark.incident("C7")
class TestC7NothingToStoreAndNoSignal:
    """vllm-ascend#10098: 8 blocks; three prompts of 60 tokens, all of which the pool has. The connector, scripted,
    keeps each one's 4 blocks until it has been stored, which it need not be."""

    @pytest.mark.parametrize(
        ("after", "laws", "finished"),
        [(None, {"PROGRESS"}, ["X", "Y"]), (0, set(), ["X", "Y", "Z"]), (2, set(), ["X", "Y", "Z"])],
        ids=["never", "at once", "two steps later"],
    )
    def test_nothing_stored_is_stored(self, after: int | None, laws: set[str], finished: list[str]) -> None:
        keeps: dict[str, Any] = {"external": {"tokens": 48}, "delay_free": True}
        if after is not None:
            keeps["send_after"] = after
        prompts = [request(name, 60, 10 * place, max_tokens=1, **keeps) for place, name in enumerate("XYZ")]
        outcome = Outcome(engine(8), prompts)
        assert outcome.laws == laws
        assert outcome.finished == finished
