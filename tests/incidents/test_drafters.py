"""Public incidents of a drafter that has KV cache groups of its own, over Mooncake.

A step takes 10 ms, a pass of the drafter 1 ms; 3 drafts are proposed in a step.
"""

import re
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from kvreplay.engine.config import SpeculativeConfig
from kvreplay.errors import ConfigError
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.specs import SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig, Role
from kvreplay.report.terminal import print_report
from tests.incidents.clusters import BLOCK, producer_and_consumer
from tests.scenarios.stage import Play, Sizes, judge, play, request, workload
from tests.scenarios.test_multi import both

MTP = SpeculativeConfig(num_speculative_tokens=3, method="mtp", draft_pass_ns=NS_PER_MS)
TARGET = (
    KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=8),
    KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=BLOCK, sliding_window=64, bytes_per_token=8),
)
DRAFTER = KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=8, is_eagle=True, drafter_only=True)
DRAFTERS_WINDOW = replace(DRAFTER, kind=SLIDING_WINDOW, sliding_window=64)
LEFT_OUT = "vllm-0.33 drafter_transfer=left-out"
CLIENTS = workload(
    *(request(name, at_ms, prompt_tokens=256, output_tokens=8) for name, at_ms in (("a", 0), ("b", 200), ("c", 400)))
)


def speculating(
    *roles: Role, drafters: KVCacheGroupSpec = DRAFTER, ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1))
) -> ReplayConfig:
    """P0 and D0, of which those with these roles have a drafter."""
    base = producer_and_consumer(90, 90, max_model_len=400, groups=(*TARGET, drafters), ranks=ranks)
    own = {name: replace(role, speculative=MTP) if name in roles else role for name, role in base.roles.items()}
    return replace(base, roles=own)


def blocks_pulled(played: Play) -> list[int | None]:
    return [event.num_blocks for event in played.of("pull.sent")]


@pytest.mark.incident("K4")
class TestK4ADraftersKvIsNotTransferred:
    """vllm#54926: prompts of 256 tokens, 16 blocks of the model's full attention, 5 of its window's, 16 of the drafter.

    (Of a window its 4 blocks and one for the overlap are moved; the consumer has no fifth.)
    """

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_mooncake_moves_it_with_the_rest(self, tmp_path: Path, behaviour: str) -> None:
        config = speculating("prefill", "decode")
        played = play(config, CLIENTS, behaviour=behaviour)
        assert blocks_pulled(played) == [16 + 4 + 16] * 3
        assert not played.of("draft.recomputed")
        drafts = judge(tmp_path, config, CLIENTS, behaviour=behaviour).speculative
        assert drafts is not None
        assert (drafts.num_recomputed_tokens, drafts.recomputed_tokens_per_request) == (0, None)

    @pytest.mark.parametrize("drafters", [DRAFTER, DRAFTERS_WINDOW], ids=["full", "window"])
    @pytest.mark.parametrize("ranks", [((1, 1), (1, 1)), ((2, 1), (1, 1))], ids=str)
    def test_left_out_each_prompt_is_computed_again_by_the_drafter(
        self, tmp_path: Path, drafters: KVCacheGroupSpec, ranks: tuple[Sizes, Sizes]
    ) -> None:
        config = speculating("prefill", "decode", drafters=drafters, ranks=ranks)
        played = play(config, CLIENTS, behaviour=LEFT_OUT)
        assert not played.violations
        assert set(blocks_pulled(played)) == {16 + 4}
        assert [(event.request_id, event.num_tokens) for event in played.of("draft.recomputed", instance="D0")] == [
            (name, 256) for name in "abc"
        ]
        summary = judge(tmp_path, config, CLIENTS, behaviour=LEFT_OUT)
        drafts = summary.speculative
        assert summary.verdict == "passed"
        assert drafts is not None
        assert (drafts.num_recomputed_tokens, drafts.num_recomputed_requests) == (768, 3)
        assert drafts.recomputed_tokens_per_request == 256.0
        # The target's own tokens are counted elsewhere.
        assert summary.recomputed_tokens.by_cause == {"full-hit-last-token": 3}
        console = Console(width=100, file=StringIO())
        print_report(summary, console)
        assert isinstance(console.file, StringIO)
        assert re.search(
            r"not transferred +768 tokens +computed again for 3 requests, 256 each", console.file.getvalue()
        )

    def test_only_what_was_loaded_is_computed_again(self) -> None:
        """`b` finds 64 tokens of `a` on the consumer, with the drafter's, less the block that it gives up."""
        text = [f"t{place}" for place in range(64)]
        other = [*text[:20], *(f"u{place}" for place in range(44))]
        twins = workload(
            request("a", 0, prompt_tokens=256, text=text), request("b", 200, prompt_tokens=256, text=other)
        )
        played = play(speculating("prefill", "decode", drafters=DRAFTER), twins, behaviour=LEFT_OUT)
        assert not played.violations
        loads = {event.request_id: event.num_tokens for event in played.of("load.finished", instance="D0")}
        again = {event.request_id: event.num_tokens for event in played.of("draft.recomputed")}
        assert again == loads
        assert loads["a"] == 256

    def test_it_takes_a_pass_of_the_drafter_and_its_share_of_a_prefill(self) -> None:
        """A third of what the model's 16 bytes per token take at 30 µs a token: 256 * 15 µs, and 1 ms."""
        config = speculating("prefill", "decode")
        slow = replace(config.roles["decode"].timing, per_prefill_token_ps=30_000_000)
        config = replace(config, roles={**config.roles, "decode": replace(config.roles["decode"], timing=slow)})
        first = workload(CLIENTS.arrivals[0])
        ends = [play(config, first, behaviour=behaviour).ends()["a"][2] for behaviour in ("vllm-0.33", LEFT_OUT)]
        assert ends[1] - ends[0] == pytest.approx(1 + 256 * 30 * 8 / 16 / 1000, abs=1e-6)

    def test_a_load_that_fails_is_computed_by_both(self) -> None:
        config = speculating("prefill", "decode")
        played = play(config, CLIENTS, "error-response:request=b", behaviour=LEFT_OUT, recompute=True)
        assert not played.violations
        assert [event.request_id for event in played.of("draft.recomputed")] == ["a", "c"]

    def test_what_a_tier_brings_it_brings_for_the_drafter_too(self) -> None:
        """The consumer's tier is asked first: of `b` nothing is pulled, and the drafter lacks nothing."""
        base = speculating("prefill", "decode")
        tiers = both("offloading,mooncake").connector
        assert tiers.options is not None
        model = replace(base.model, groups=(TARGET[0], DRAFTER))
        config = replace(base, connector=tiers, model=model)
        text = [f"t{place}" for place in range(64)]
        again = workload(
            request("a", 0, prompt_tokens=128, text=text), request("b", 1000, prompt_tokens=128, text=text)
        )
        played = play(config, again, "cache.reset:at=500ms,instance=D0,what=gpu", behaviour=LEFT_OUT)
        assert not played.violations
        assert [event.request_id for event in played.of("draft.recomputed")] == ["a"]
        (load,) = played.of("load.started", instance="D0", request_id="b")
        assert (load.num_tokens, load.status) == (112, "CPU")  # a block of 16 is given up for the drafter


@pytest.mark.incident("K5")
class TestK5OnlyTheConsumerHasADrafter:
    """vllm#49230, sglang#30222: it has a group more than the producer."""

    @pytest.mark.parametrize("num_tokens", [32, 320])
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_its_pulls_are_refused(self, num_tokens: int, behaviour: str, *, recompute: bool) -> None:
        one = workload(request("a", prompt_tokens=num_tokens, output_tokens=4))
        played = play(speculating("decode"), one, behaviour=behaviour, recompute=recompute)
        assert not played.violations
        assert [event.cause for event in played.of("pull.settled")] == ["KV group count mismatch"]
        assert played.ends()["a"][0] == ("finished" if recompute else "failed")

    def test_where_the_drafters_is_not_transferred_nobody_misses_it(self) -> None:
        played = play(speculating("decode"), CLIENTS, behaviour=LEFT_OUT)
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        assert [event.num_tokens for event in played.of("draft.recomputed")] == [256] * 3


def test_a_drafters_own_groups_are_marked_and_last() -> None:
    with pytest.raises(ConfigError, match="drafter_only needs is_eagle"):
        KVCacheGroupSpec(drafter_only=True)
    model = speculating().model
    with pytest.raises(ConfigError, match="what is drafter_only comes after all others"):
        replace(model, groups=(DRAFTER, *TARGET))
    with pytest.raises(ConfigError, match="at least one group that is not drafter_only is needed"):
        replace(model, groups=(DRAFTER,))
