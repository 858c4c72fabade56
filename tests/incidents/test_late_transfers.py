"""Public incidents of class F: blocks that go to somebody else while a transfer still writes or reads them."""

from random import Random

import pytest

from kvreplay.ids import NS_PER_S
from tests.incidents.clusters import crashes, how, laws
from tests.incidents.ticks import at, clients, engines, offloaded, usable
from tests.scenarios.stage import Play, play, request, workload

FREED = "aborted_loads=free unexpected_reports=ignore"
"""SGLang's: a request that is aborted gives back what it is being loaded into, and its load's report is nothing."""


@pytest.mark.incident("F1")
class TestF1PagesAreFreedWhileTheyAreWritten:
    """sglang#24527, sglang#32564, sglang#35049, sglang#35360: of D's 32 pages A has 31, which are written until 7; it
    is aborted at 3; B comes at 4 and needs all 32. Ticks of a second; D takes one for each token."""

    def play(self, behaviour: str, fault: str = "slow:request=A,delay=7s") -> Play:
        slow = usable(32, max_model_len=512, step_ms=1000)
        config = engines(usable(64, max_model_len=512), slow, receive_timeout=30)
        both = clients(at(0, "A", 31 * 16), at(4, "B", 31 * 16 + 8, output_tokens=5), leave=[("A", 3)])
        return play(config, both, fault, behaviour=behaviour)

    def loaded_from(self, played: Play, name: str) -> float:
        (event,) = played.of("load.started", instance="D0", request_id=name)
        return event.time_ns / NS_PER_S

    @pytest.mark.parametrize("profile", ["vllm-0.33", "ideal"])
    def test_freed_at_once_they_are_written_over(self, profile: str) -> None:
        """Whatever else is right: the pull of A is open, and its write is one that is waited for."""
        played = self.play(f"{profile} {FREED}")
        assert how(played) == {"A": "aborted", "B": "finished"}
        assert self.loaded_from(played, "B") == pytest.approx(4, abs=0.1)
        told = [(event.status, event.request_id, event.transfer_id) for event in played.violations]
        assert told.count(("FENCE", "B", "xfer-A")) == told.count(("CONTENT", "B", "xfer-A")) == 31
        assert len(told) == 62
        assert played.violations[0].cause == "a write for A landed in a block that belongs to B by now"
        given_away = {finding.block_id for finding in played.broken_laws()}
        assert given_away == set(range(1, 32))

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_deferred_b_begins_when_the_write_is_over(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert how(played) == {"A": "aborted", "B": "finished"}
        assert self.loaded_from(played, "B") == pytest.approx(7, abs=0.1)
        assert (laws(played), played.broken_laws()) == (set(), [])

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_or_when_nobody_is_waited_for_any_longer(self, behaviour: str) -> None:
        """The word that it is over is lost: the fallback after 30."""
        played = self.play(behaviour, "timeout:request=A")
        assert how(played) == {"A": "aborted", "B": "finished"}
        assert self.loaded_from(played, "B") == pytest.approx(30, abs=0.1)
        assert (laws(played), played.broken_laws()) == (set(), [])


@pytest.mark.incident("F3")
class TestF3AStoreReadsWhatItsRequestHasLost:
    """vllm#52360, vllm#52470: of 5 blocks R1 has its 4 stored, and is preempted before they have been read; R2 takes
    them; R3 has the prompt of R1. A CPU tier whose stores read late is MooncakeStore's queue."""

    PREEMPTED = "scheduler.preempt:request=R1,at=request.first_token"
    LATE = "offload.late-read:request=R1,delay=30ms"

    def play(self, behaviour: str, *faults: str) -> Play:
        text = [f"t{place}" for place in range(16)]
        requests = workload(
            request("R1", 0, prompt_tokens=64, output_tokens=4, text=text),
            request("R2", 5, prompt_tokens=64, output_tokens=2),
            request("R3", 1000, prompt_tokens=64, output_tokens=2, text=text),
        )
        config = offloaded(usable(5, max_model_len=80), cpu_chunks=40)
        return play(config, requests, self.PREEMPTED, *faults, behaviour=behaviour)

    def test_whoever_loads_it_gets_another_requests_kv(self) -> None:
        """R1 itself, as it resumes, and R3 much later; each of four blocks is wrong."""
        played = self.play("vllm-0.33", self.LATE)
        assert set(how(played).values()) == {"finished"}
        assert laws(played) == {"CONTENT"}
        assert [event.cause for event in played.violations if event.request_id == "R1"] == [
            f"read wrong contents from position {start} on" for start in (0, 16, 32, 48)
        ]
        assert {event.request_id for event in played.violations} == {"R1", "R3"}

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_where_a_preemption_waits_for_the_stores_it_is_right(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert set(how(played).values()) == {"finished"}
        assert [event.num_tokens for event in played.of("load.finished", request_id="R3")] == [64]
        assert laws(played) == set()

    def test_ideally_what_has_been_read_late_is_not_kept(self) -> None:
        played = self.play("ideal", self.LATE)
        assert set(how(played).values()) == {"finished"}
        assert (laws(played), crashes(played)) == (set(), [])


@pytest.mark.incident("F8")
class TestF8GibberishAfterAHundredRequests:
    """sglang#23020, of which only the symptom is told. 200 requests over 64 pages, with aborts and slow writes at
    random, where aborts free what is being written: the first wrong block has a name, a writer and an owner."""

    def play(self, behaviour: str, seed: int) -> Play:
        rng = Random(seed)
        many = workload(
            *(
                request(f"r{n:03}", 20 * n, prompt_tokens=rng.randint(16, 400), output_tokens=rng.randint(1, 8))
                for n in range(200)
            )
        )
        config = engines(usable(64, max_model_len=512), usable(64, max_model_len=512))
        faults = ("abort:p=0.2,delay=5ms", "slow:p=0.3,delay=300ms")
        return play(config, many, *faults, behaviour=behaviour, seed=seed)

    def test_the_first_wrong_block(self) -> None:
        played = self.play(f"vllm-0.33 {FREED}", seed=0)
        first = next(event for event in played.violations if event.status == "CONTENT")
        assert (first.request_id, first.block_ids, first.transfer_id) == ("r083", [63], "xfer-r080")
        (fence,) = [event for event in played.violations if event.status == "FENCE" and event.block_ids == [63]]
        assert fence.cause == "a write for r080 landed in a block that belongs to r083 by now"
        assert first.cause_handle is not None
        fault = played.events[first.cause_handle]
        assert (fault.kind, fault.request_id) == ("fault.injected", "r080")
        assert how(played)["r080"] == "aborted"

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("seed", [0, 3])
    def test_where_the_pages_are_held_there_is_none(self, seed: int, behaviour: str) -> None:
        played = self.play(behaviour, seed)
        assert (laws(played), crashes(played)) == (set(), [])
        assert played.num_free("P0") == played.num_free("D0") == 64
