"""Public incidents of tiers that never answer (kind B): a lookup, and a load from the slowest tier."""

from typing import Any

import pytest

from tests.incidents.clusters import how
from tests.incidents.ticks import about, at, clients, ends, laws, offloaded
from tests.scenarios.stage import Play, play


def text(name: str) -> list[str]:
    return [f"{name}{place}" for place in range(17)]


@pytest.mark.incident("B11")
class TestB11ALoadFromDiskThatIsNeverDone:
    """dynamo#5012, dynamo#4087, with the tiers of vLLM's offloading connector: 8 blocks on the GPU, 4 chunks in CPU
    memory, all in storage. R1 to R3 have 64 tokens each; R1's prompt comes again at 4, its 4 chunks from storage."""

    REQUESTS = clients(
        *(at(place, f"R{place + 1}", 64, text=text(f"{place}")) for place in range(3)),
        at(4, "again", 65, text=text("0")),
    )
    LOST = pytest.mark.parametrize("fault", ["offload.done-lost", "offload.copy-hang"])

    def play(self, *faults: str, behaviour: str, recompute: bool = True) -> Play:
        config = offloaded(8, cpu_chunks=4, spec_name="TieringOffloadingSpec", copy_timeout=10, lookup_timeout=5)
        return play(config, self.REQUESTS, *faults, behaviour=behaviour, recompute=recompute)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_without_a_fault_it_comes_from_storage(self, behaviour: str) -> None:
        played = self.play(behaviour=behaviour)
        (loaded,) = played.of("load.started")
        assert (loaded.request_id, loaded.num_blocks, loaded.status) == ("again", 4, "STORAGE")
        assert set(how(played).values()) == {"finished"}

    @LOST
    def test_nobody_minds_the_time(self, fault: str) -> None:
        played = self.play(f"{fault}:request=again", behaviour="vllm-0.33")
        assert how(played)["again"] == "stalled"
        assert [event.cause for event in played.of("request.stalled")] == ["remote KV"]
        assert (laws(played), played.num_free("E0")) == ({"stall", "CONSERVATION"}, 4)

    @LOST
    def test_it_has_a_deadline_and_another_try(self, fault: str) -> None:
        """10 ticks for each; storage has the chunks still, and loses the second as well."""
        played = self.play(f"{fault}:request=again", behaviour="ideal")
        assert ends(played)["again"] == about("finished", 24)
        assert [event.num_tokens for event in played.of("tokens.recomputed")] == [64]
        assert (laws(played), played.num_free("E0")) == (set(), 8)

    @LOST
    def test_or_fails_at_its_deadline(self, fault: str) -> None:
        played = self.play(f"{fault}:request=again", behaviour="ideal", recompute=False)
        assert ends(played)["again"] == about("failed", 14)

    def test_what_cannot_even_be_read_from_storage_is_given_up_too(self) -> None:
        """Its lookup orders the read again and again; 5 ticks of that are enough."""
        fault = "offload.promotion-fail:request=again"
        assert how(self.play(fault, behaviour="vllm-0.33"))["again"] == "stalled"
        assert ends(self.play(fault, behaviour="ideal"))["again"] == ("finished", 9.031)


@pytest.mark.incident("B15")
class TestB15ALookupThatIsNotDecided:
    """LMCache#1960, LMCache#3766, LMCache#3685. The bound is 10 ticks; `again` comes at 1."""

    REQUESTS = clients(at(0, "R1", 64, text=text("0")), at(0, "R2", 64), at(1, "again", 65, text=text("0")))
    EVICTED = "cache.reset:at=500ms"

    def play(self, *faults: str, behaviour: str, **options: Any) -> Play:  # noqa: ANN401 - fields of OffloadingConfig
        config = offloaded(16, cpu_chunks=64, lookup_timeout=10, **options)
        return play(config, self.REQUESTS, self.EVICTED, *faults, behaviour=behaviour)

    def test_one_that_never_is_skips_its_request_for_ever(self) -> None:
        played = self.play("offload.lookup-pending-forever:request=again", behaviour="vllm-0.33")
        assert how(played) == {"R1": "finished", "R2": "finished", "again": "stalled"}
        assert [event.cause for event in played.of("request.stalled")] == ["an undecided lookup"]

    def test_after_the_bound_it_is_a_miss(self) -> None:
        played = self.play("offload.lookup-pending-forever:request=again", behaviour="ideal")
        assert ends(played)["again"] == ("finished", 11.031)
        assert [event.num_tokens for event in played.of("tokens.recomputed")] == [64]
        assert laws(played) == set()

    def test_and_stays_one_when_it_is_asked_again(self) -> None:
        """It is preempted after its first token, and asks for all that it had: no exception, and no second wait."""
        faults = ("offload.lookup-pending-forever:request=again", "scheduler.preempt:request=again")
        played = self.play(*faults, behaviour="ideal")
        assert [event.request_id for event in played.of("request.preempted")] == ["again"]
        assert ends(played)["again"] == about("finished", 11)
        assert laws(played) == set()

    @pytest.mark.parametrize(("behaviour", "tick"), [("vllm-0.33", 30), ("ideal", 11)])
    def test_one_that_takes_thirty_ticks_costs_ten(self, behaviour: str, tick: float) -> None:
        """What it finds is being stored, and will be until 30."""
        fault = "offload.store-slow:request=R1,delay=30s"
        played = self.play(fault, behaviour=behaviour, copy_timeout=100)
        assert ends(played)["again"] == about("finished", tick, 0.2)
