"""Speculative decoding, worked out by hand: a step takes 10 ms whatever it does, and its drafter what is said."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvreplay.engine.config import SpeculativeConfig
from kvreplay.engine.sched.state import SchedulerState
from kvreplay.events import DETAIL_STEPS, Event
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.attention_managers import FullAttentionCacheManager
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig
from kvreplay.trace.workload import Workload
from tests.scenarios.offload_stage import offloading
from tests.scenarios.speculative_worlds import with_drafts
from tests.scenarios.stage import Play, judge, pair, play, request, role, single, workload

FULL = KVCacheGroupSpec(block_size=4, bytes_per_token=1)
STATES = KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode=MAMBA_ALIGN, state_bytes=4)


def drafting(count: int = 2, **settings: Any) -> SpeculativeConfig:  # noqa: ANN401 - fields of SpeculativeConfig
    return SpeculativeConfig(num_speculative_tokens=count, **{"draft_pass_ns": 0, **settings})


def one_right(count: int = 2, **settings: Any) -> SpeculativeConfig:  # noqa: ANN401 - fields of SpeculativeConfig
    """Of each verification's drafts the first is right, and no other."""
    return drafting(count, synthetic_acceptance_rates=(1.0, *([0.0] * (count - 1))), **settings)


def engine(speculative: SpeculativeConfig | None, *, num_gpu_blocks: int = 33) -> ReplayConfig:
    return with_drafts(single(role(num_gpu_blocks=num_gpu_blocks)), speculative)


def shares(played: Play, name: str) -> list[tuple[int | None, int | None, str | None]]:
    """(computed before, tokens, right drafts/drafts) of each step that computes for this request."""
    return [
        (event.num_blocks, event.num_tokens, event.status) for event in played.of("request.scheduled", request_id=name)
    ]


ALONE = workload(request("a", prompt_tokens=8, output_tokens=6))


def test_a_verification_brings_what_was_right_and_one_more() -> None:
    """The prompt's step samples one token; then two a step, and of the last two one is over."""
    played = play(engine(one_right()), ALONE)
    assert shares(played, "a") == [(0, 8, None), (8, 3, "1/2"), (10, 3, "1/2"), (12, 3, "1/2")]
    assert played.ends()["a"] == ("finished", "E0", 4 * 10 + 1)
    assert not played.violations


def test_the_output_is_that_without_speculation() -> None:
    plain, drafted = (play(engine(speculative), ALONE).of("request.finished") for speculative in (None, one_right()))
    assert [(event.num_tokens, event.output_hash) for event in plain] == [
        (event.num_tokens, event.output_hash) for event in drafted
    ]


@pytest.mark.parametrize(
    ("settings", "drafting_ms"), [({}, 6), ({"parallel_drafting": True}, 3), ({"method": "ngram"}, 0)]
)
def test_the_drafter_takes_its_time_where_somebody_can_use_what_it_drafts(
    settings: dict[str, Any], drafting_ms: int
) -> None:
    """In every step but the last, after which nobody is left; words that are found cost nothing."""
    played = play(engine(one_right(draft_pass_ns=3 * NS_PER_MS, **settings)), ALONE)
    durations = [int(str(event.status)) / NS_PER_MS for event in played.of("step")]
    assert durations == [10 + drafting_ms] * 3 + [10]


def test_the_report_counts_drafts(tmp_path: Path) -> None:
    summary = judge(tmp_path, engine(one_right()), ALONE)
    drafts = summary.speculative
    assert drafts is not None
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (3, 6, 3)
    assert (drafts.draft_acceptance_rate, drafts.mean_acceptance_length) == (0.5, 2.0)
    assert judge(tmp_path, engine(None), ALONE).speculative is None


def test_how_many_are_right_follows_from_seed_request_and_position() -> None:
    """Not from who else is there."""
    config = engine(drafting(3, synthetic_acceptance_length=2.5), num_gpu_blocks=100)
    others = [request(f"o{place}", place, prompt_tokens=9, output_tokens=20) for place in range(3)]
    alone = request("a", prompt_tokens=8, output_tokens=30)
    lonely, crowded = play(config, workload(alone)), play(config, workload(alone, *others))
    assert shares(lonely, "a") == shares(crowded, "a")
    assert len({status for _, _, status in shares(lonely, "a")}) > 2
    assert shares(play(config, workload(alone), seed=1), "a") != shares(lonely, "a")


def test_a_length_is_met_on_average(tmp_path: Path) -> None:
    config = engine(drafting(3, synthetic_acceptance_length=2.4), num_gpu_blocks=400)
    clients = workload(*(request(f"r{place}", 50 * place, prompt_tokens=8, output_tokens=50) for place in range(40)))
    drafts = judge(tmp_path, config, clients).speculative
    assert drafts is not None
    assert drafts.mean_acceptance_length == pytest.approx(2.4, abs=0.05)


# -- what may be hit ------------------------------------------------------------------------------------------

SHARED = workload(
    request("a", 0, prompt_tokens=16, output_tokens=1, text="abcd"),
    request("b", 100, prompt_tokens=20, output_tokens=1, text="abcdX"),
)


def hit(config: ReplayConfig, clients: Workload = SHARED) -> int | None:
    """Tokens that `b` need not compute."""
    played = play(config, clients)
    assert not played.violations
    return shares(played, "b")[0][0]


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"method": "ngram"}, 16),
        ({"method": "eagle"}, 12),
        ({"method": "eagle", "disable_lookahead_block_hashes": True}, 12),
        ({"method": "eagle", "disable_eagle_block_drop": True}, 16),
    ],
)
def test_a_hash_covers_what_the_drafter_reads_behind_its_block(settings: dict[str, Any], tokens: int) -> None:
    """The fifth block of `b` begins with another token than the output of `a`; or the last hit is given up."""
    assert hit(engine(drafting(**settings))) == tokens


def test_with_lookahead_hashes_a_prompt_that_is_sent_again_is_hit_whole() -> None:
    first = request("a", 0, prompt_tokens=20, output_tokens=1, text="abcde")
    twins = workload(first, replace(first, request_id="b", time_ns=100 * NS_PER_MS))
    assert hit(engine(drafting(method="eagle")), twins) == 16
    assert hit(engine(drafting(method="eagle", disable_lookahead_block_hashes=True)), twins) == 12


def test_a_connector_makes_hits_lose_their_last_block() -> None:
    """And its own tier, of which no group is known as the drafter's, brings that back."""
    played = play(with_drafts(offloading(num_gpu_blocks=33), drafting(method="eagle")), SHARED)
    assert [event.num_tokens for event in played.of("load.started", request_id="b")] == [4]
    assert shares(played, "b")[0] == (16, 4, None)


# -- what is in the blocks ------------------------------------------------------------------------------------

TURNS = workload(
    request("a", 0, prompt_tokens=8, output_tokens=13, session="s", turn=0),
    request("b", 500, prompt_tokens=26, output_tokens=3, session="s", turn=1),
)


def with_states(speculative: SpeculativeConfig, **scheduler: Any) -> ReplayConfig:  # noqa: ANN401 - SchedulerConfig
    """Every state is kept."""
    own = role(num_gpu_blocks=80, **scheduler)
    own = replace(own, cache=replace(own.cache, prefix_cache_retention_interval=None))
    base = single(own)
    return with_drafts(replace(base, model=replace(base.model, groups=(FULL, STATES))), speculative)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("count", "length"), [(1, 1.5), (2, 2.0), (3, 1), (3, 4), (3, 2.5)])
@pytest.mark.parametrize("output_tokens", [13, 14, 15, 16, 17])
def test_a_state_at_a_blocks_end_is_there_for_the_next_turn(
    output_tokens: int, count: int, length: float, *, overlaps: bool
) -> None:
    """Drafts cross it, right and wrong ones."""
    config = with_states(drafting(count, method="ngram", synthetic_acceptance_length=length), async_scheduling=overlaps)
    first, second = TURNS.arrivals
    turns = workload(replace(first, output_tokens=output_tokens), second)
    assert hit(config, turns) == (8 + output_tokens - 1) // 4 * 4


def test_blocks_that_were_hashed_with_drafts_in_them_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn is sent before the output is there, when wrong drafts have just filled a block."""
    none_right = drafting(3, method="ngram", synthetic_acceptance_length=1)
    config = with_drafts(single(role(num_gpu_blocks=80)), none_right)
    early = workload(TURNS.arrivals[0], replace(TURNS.arrivals[1], time_ns=12 * NS_PER_MS))
    assert not play(config, early).violations

    real = FullAttentionCacheManager.cache_blocks

    def cache_drafts_too(self: Any, asked: Any, keys: Any, num_tokens: int) -> Any:  # noqa: ANN401 - as the real one
        known = asked.num_tokens
        num_tokens = asked.num_tokens = min(num_tokens, asked.content.num_tokens)
        try:
            return real(self, asked, keys, num_tokens)
        finally:
            asked.num_tokens = known

    monkeypatch.setattr(FullAttentionCacheManager, "cache_blocks", cache_drafts_too)
    monkeypatch.setattr(
        SchedulerState,
        "_cache_computed",
        lambda self, asked, num_tokens: self.kv.cache_blocks(asked, asked.content.block_keys, num_tokens),
    )
    found = play(config, early).violations
    assert {(event.status, event.request_id, event.block_ids[0]) for event in found if event.block_ids} == {
        ("CONTENT", "b", 3)
    }


# -- two instances --------------------------------------------------------------------------------------------


def test_a_decode_instance_may_speculate_alone() -> None:
    """The first step after the load is padded with placeholders, which nobody drafted: all wrong."""
    config = pair()
    decode = with_drafts(config, one_right()).roles["decode"]
    played = play(replace(config, roles={**config.roles, "decode": decode}), ALONE)
    assert [event.status for event in played.of("request.scheduled", instance="P0")] == [None]
    own = [(event.num_tokens, event.status) for event in played.of("request.scheduled", instance="D0")]
    assert own[0] == (3, "0/2")
    assert {status for _, status in own[1:]} == {"1/2"}
    assert not played.violations
    kinds: list[Event] = played.of("request.finished", instance="D0")
    assert [event.num_tokens for event in kinds] == [6]


def test_detail_says_what_was_drafted() -> None:
    played = play(engine(one_right()), ALONE, detail=DETAIL_STEPS)
    assert "11 E0 a request.scheduled tokens=3 blocks=8 status=1/2" in played.story(detail=DETAIL_STEPS)
