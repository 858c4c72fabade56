"""Public incidents of class F in models with several KV cache groups: contents that are lost, or were never there."""

from dataclasses import replace

import pytest

from kvreplay.ids import NS_PER_MS
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, SLIDING_WINDOW, KVCacheGroupSpec
from tests.incidents import scripted
from tests.incidents.clusters import FULL, crashes, how, laws, producer_and_consumer
from tests.incidents.scripted import Outcome, engine, load
from tests.scenarios.stage import Play, play, request, workload

STATES = KVCacheGroupSpec(kind=MAMBA, block_size=16, mamba_cache_mode=MAMBA_ALIGN, state_bytes=16)
WINDOW = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=16, sliding_window=32, bytes_per_token=1)


@pytest.mark.incident("F5")
class TestF5BlocksAreZeroedWhenTheirLoadHasLanded:
    """vllm#45357, vllm#47373, vllm#48481: two steps in flight, of 30 ms; `a` gets four blocks of attention, and what
    has landed in them after 34 ms is zeroed when the step that was in progress is over. `b` only keeps the engine
    busy."""

    LATE = "vllm-0.33 zeroed_loads=late"

    def play(self, behaviour: str, *faults: str, prompt_tokens: int = 64, overlaps: bool = True) -> Play:
        config = producer_and_consumer(
            40, 40, groups=(FULL, STATES), scheduler={"decode": {"async_scheduling": overlaps}}, max_model_len=160
        )
        decode = config.roles["decode"]
        decode = replace(decode, timing=replace(decode.timing, fixed_ns=30 * NS_PER_MS))
        clients = workload(
            request("b", prompt_tokens=32, output_tokens=20), request("a", 100, prompt_tokens=prompt_tokens)
        )
        return play(
            replace(config, roles={**config.roles, "decode": decode}),
            clients,
            *faults,
            behaviour=behaviour,
            recompute=True,
        )

    @pytest.mark.parametrize(("prompt_tokens", "num_blocks"), [(64, 4), (72, 5)])
    def test_all_of_attention_is_lost(self, prompt_tokens: int, num_blocks: int) -> None:
        """Also of a last block that is half full. (A state is not zeroed: it is copied over.)"""
        played = self.play(self.LATE, prompt_tokens=prompt_tokens)
        assert how(played) == {"a": "finished", "b": "finished"}
        assert laws(played) == {"CONTENT"}
        assert [(event.request_id, event.group, event.cause) for event in played.violations] == [
            ("a", 0, f"read wrong contents from position {16 * place} on") for place in range(num_blocks)
        ]

    def test_not_where_steps_do_not_overlap(self) -> None:
        assert laws(self.play(self.LATE, overlaps=False)) == set()

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("prompt_tokens", [64, 72])
    def test_left_to_the_load_they_have_what_it_brings(self, prompt_tokens: int, behaviour: str) -> None:
        played = self.play(behaviour, prompt_tokens=prompt_tokens)
        assert how(played) == {"a": "finished", "b": "finished"}
        assert laws(played) == set()

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_of_a_load_that_fails_they_are_zeroed_and_computed(self, behaviour: str) -> None:
        played = self.play(behaviour, "mooncake.engine-ret:request=a")
        again = [event.num_tokens for event in played.of("tokens.recomputed", instance="D0", request_id="a")]
        assert again == [48, 15]
        assert how(played) == {"a": "finished", "b": "finished"}
        assert laws(played) == set()

    def test_ideally_also_where_a_part_of_it_has_not_come_unseen(self) -> None:
        fault = "mooncake.engine-partial:request=a,share=0.75"
        assert laws(self.play("vllm-0.33", fault)) == {"CONTENT"}
        assert laws(self.play("ideal", fault)) == set()


@pytest.mark.incident("F6")
class TestF6ALoadOfOneGroupTakesTheHitOfAnother:
    """vllm#33775, vllm#44409: 10 blocks of 16 tokens; of a prompt of 96 tokens 64 are hit and 32 loaded. R0 leaves full
    attention's blocks 1 to 4 and the window's 8 behind, in a queue 5, 4, 3, 2, 1, 8, 7, 6, 9, 10. (A window of 48
    tokens: one of 32 would not reach back to the hit from where the load ends.)"""

    GROUPS = ({"type": "full"}, {"type": "swa", "sliding_window": 48})

    def outcome(self, *switches: str, behaviour: str = "vllm-0.33") -> Outcome:
        requests = [
            scripted.request("R0", 64, first=7, max_tokens=1),
            scripted.request("X", 16, 2, max_tokens=1),
            scripted.request("R", 96, 4, first=7, max_tokens=1, **load(96, after=2)),
        ]
        return Outcome(engine(10, groups=[*self.GROUPS]), requests, *switches, behaviour=behaviour)

    @staticmethod
    def tables(outcome: Outcome) -> list[list[int]]:
        ((name, _, tables),) = outcome.steps[4]["alloc"]
        assert name == "R"
        return [list(table) for table in tables]

    def test_group_by_group_a_block_is_there_twice(self) -> None:
        outcome = self.outcome("hybrid_adoption=per_group")
        assert self.tables(outcome) == [[1, 2, 3, 4, 5, 8], [0, 0, 0, 8, 7, 6]]
        assert outcome.steps[4]["after"]["ref"]["8"] == 2
        assert outcome.laws == {"CONTENT"}
        assert [(finding.block_id, finding.group) for finding in outcome.findings] == [(8, 1)]

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_where_all_hits_come_first_none_is(self, behaviour: str) -> None:
        outcome = self.outcome(behaviour=behaviour)
        assert self.tables(outcome) == [[1, 2, 3, 4, 5, 7], [0, 0, 0, 8, 6, 9]]
        assert set(outcome.steps[4]["after"]["ref"].values()) == {1}
        assert outcome.laws == set()
        assert outcome.finished == ["R0", "X", "R"]


@pytest.mark.incident("F9")
class TestF9AFailedTransferOfAHybridCountsAsReceived:
    """vllm-backport#33, vllm#40364: four ranks, two groups, a prompt of 64 tokens; all ranks' writes fail within a
    step, and what had landed of them by then is all that there is."""

    RECEIVED = ("vllm-0.33 mooncake_failure=received", "vllm-0.33 request_level_failures=off")

    def play(self, behaviour: str, landed: int, *, recompute: bool) -> Play:
        """`landed`: runs of neighbouring blocks that each rank has written; a group's are one."""
        config = producer_and_consumer(40, 40, groups=(FULL, WINDOW), ranks=((4, 1), (4, 1)))
        clients = workload(request("R", prompt_tokens=64), request("S", 500, prompt_tokens=64))
        fault = f"mooncake.engine-late:request=R,landed={landed}"
        return play(config, clients, fault, behaviour=behaviour, recompute=recompute)

    @pytest.mark.parametrize("recompute", [False, True])
    @pytest.mark.parametrize(("landed", "groups"), [(0, {0, 1}), (1, {1})])
    @pytest.mark.parametrize("behaviour", RECEIVED)
    def test_the_answer_is_200_and_wrong(
        self, behaviour: str, landed: int, groups: set[int], *, recompute: bool
    ) -> None:
        played = self.play(behaviour, landed, recompute=recompute)
        assert how(played) == {"R": "finished", "S": "finished"}
        assert laws(played) == {"CONTENT"}
        assert {event.request_id for event in played.violations} == {"R"}
        assert {event.group for event in played.violations} == groups

    @pytest.mark.parametrize(("behaviour", "num_tokens"), [("vllm-0.33", 64), ("ideal", 63)])
    @pytest.mark.parametrize("landed", [0, 1])
    def test_the_whole_request_is_computed_again(self, landed: int, behaviour: str, num_tokens: int) -> None:
        """Ideally its last token was not to be loaded."""
        played = self.play(behaviour, landed, recompute=True)
        assert how(played) == {"R": "finished", "S": "finished"}
        again = [event.num_tokens for event in played.of("tokens.recomputed", instance="D0", request_id="R")]
        assert again == [num_tokens]
        assert (laws(played), crashes(played)) == (set(), [])

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_or_fails(self, behaviour: str) -> None:
        played = self.play(behaviour, 1, recompute=False)
        assert how(played) == {"R": "failed", "S": "finished"}
        assert (laws(played), crashes(played)) == (set(), [])
