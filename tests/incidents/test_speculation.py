"""Public incidents of speculative decoding as whole runs: with a CPU tier, and over Mooncake.

Each class is an incident; the version that had it wrong is one switch away.
"""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from kvreplay.engine.config import SpeculativeConfig
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.config import ReplayConfig, Role, RoleConfig
from kvreplay.replay.config_load import load_config
from kvreplay.replay.presets import find_trace
from kvreplay.replay.runner import RunOptions, run_trace
from kvreplay.trace.reader import read_trace
from kvreplay.trace.workload import Workload
from kvreplay.verdict.model import Summary
from tests.scenarios.offload_stage import offloading
from tests.scenarios.speculative_worlds import with_drafts
from tests.scenarios.stage import Play, pair, play, request, workload

MTP = SpeculativeConfig(num_speculative_tokens=1, method="mtp", draft_pass_ns=0)
NARROW = "vllm-0.33 offload_eagle_lookup=narrow"
EMPTY_GPU = "cache.reset:at=900ms,what=gpu"


def full(block_size: int, bytes_per_token: int, *, is_eagle: bool = False) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(block_size=block_size, bytes_per_token=bytes_per_token, is_eagle=is_eagle)


def states(block_size: int, state_bytes: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(kind=MAMBA, block_size=block_size, mamba_cache_mode=MAMBA_ALIGN, state_bytes=state_bytes)


def sized(config: ReplayConfig, *, num_gpu_blocks: int, max_model_len: int, budget: int = 2048) -> ReplayConfig:
    """The same cluster for prompts of this length."""

    def of_role(role: RoleConfig) -> RoleConfig:
        scheduler = replace(role.scheduler, max_model_len=max_model_len, max_num_batched_tokens=budget)
        return replace(role, scheduler=scheduler, cache=replace(role.cache, num_gpu_blocks=num_gpu_blocks))

    roles: dict[Role, RoleConfig] = {name: of_role(role) for name, role in config.roles.items()}
    return replace(config, model=replace(config.model, max_model_len=max_model_len), roles=roles)


def resent(num_tokens: int) -> Workload:
    """A prompt, and once the GPU has lost it, again."""
    text = [f"t{place}" for place in range(-(-num_tokens // 4))]
    return workload(
        *(
            request(name, at_ms, prompt_tokens=num_tokens, output_tokens=2, text=text)
            for name, at_ms in (("a", 0), ("b", 1000))
        )
    )


def tier(*groups: KVCacheGroupSpec, speculative: SpeculativeConfig | None) -> ReplayConfig:
    """One engine with a CPU tier, and room for everything; states are kept where prompts that are sent again end."""
    base = sized(offloading(cpu_chunks=4000), num_gpu_blocks=1000, max_model_len=1200)
    base = replace(base, model=replace(base.model, groups=groups))
    return with_drafts(base, speculative)


def loaded(played: Play) -> int:
    """Tokens that `b` got from the CPU tier."""
    return sum(event.num_tokens or 0 for event in played.of("load.finished", request_id="b"))


def laws(played: Play) -> Counter[str | None]:
    return Counter(event.status for event in played.violations)


@pytest.mark.incident("K1")
class TestK1WithMtpTheHostTierIsWrittenAndNeverRead:
    """vllm#52674, vllm#52735: each group gives up a chunk, and none is asked for one more."""

    GROUPS = (full(16, 1), states(16, 16))

    @pytest.mark.parametrize("num_tokens", [300, 328])
    def test_without_speculation_nothing_is_lost(self, num_tokens: int) -> None:
        played = play(tier(*self.GROUPS, speculative=None), resent(num_tokens), EMPTY_GPU, behaviour=NARROW)
        assert loaded(played) == (num_tokens - 1) // 16 * 16
        assert not played.violations

    @pytest.mark.parametrize("num_tokens", [300, 328])
    def test_before_the_fix_nothing_is_served(self, num_tokens: int) -> None:
        played = play(tier(*self.GROUPS, speculative=MTP), resent(num_tokens), EMPTY_GPU, behaviour=NARROW)
        assert played.of("store.finished")
        assert loaded(played) == 0
        assert laws(played) == {"HIT-ATTAINABLE": 1}
        (finding,) = played.violations
        assert finding.request_id == "b"
        assert finding.cause == (
            f"a hit of 0 tokens, where all groups have {num_tokens // 16 * 16 - 16} without the chunk that a drafter "
            "gives up"
        )

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("num_tokens", [300, 320, 328])
    def test_after_it_one_block_is_given_up(self, num_tokens: int, behaviour: str) -> None:
        """The incident's own numbers, with 320: at least 288."""
        played = play(tier(*self.GROUPS, speculative=MTP), resent(num_tokens), EMPTY_GPU, behaviour=behaviour)
        assert loaded(played) >= num_tokens // 16 * 16 - 32 + (num_tokens % 16 > 0) * 16
        assert not played.violations

    @pytest.mark.parametrize(("lookup", "status"), [("widened", 0), ("narrow", 3)])
    def test_a_session_with_a_hybrid_preset(self, lookup: str, status: int) -> None:
        """Qwen3-Next with its MTP module, on the canned trace."""
        sets = ["speculative.num_speculative_tokens=1", "speculative.method=mtp"]
        summary = run("multi-turn", "offload-hybrid", *sets, switches=[f"offload_eagle_lookup={lookup}"])
        assert summary.exit_status == status
        assert {violation.checker for violation in summary.violations} == ({"HIT-ATTAINABLE"} if status else set())
        assert summary.tiers is not None
        assert (summary.tiers.hit_tokens["CPU"] > 6000) == (status == 0)


def run(trace: str, config: str, *sets: str, switches: list[str]) -> Summary:
    path: Path = find_trace(trace)
    loaded_config = load_config(config, sets=sets, switches=switches)
    return run_trace(RunOptions(trace=path, loaded=loaded_config), read_trace(path)).summary


@pytest.mark.incident("K2")
class TestK2OneGroupTakesTheWholeHitWithIt:
    """vllm#51771, vllm#53504: three block sizes. Of a short prompt the widest group has one chunk, and gives it up."""

    UNMARKED = (
        full(16, 16),
        KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=64, sliding_window=64, bytes_per_token=4),
        full(256, 1),
    )
    MARKED = (full(16, 16, is_eagle=True), *UNMARKED[1:])

    def test_where_all_groups_are_taken_for_the_drafters_it_is_never_served(self) -> None:
        played = play(tier(*self.UNMARKED, speculative=MTP), resent(300), EMPTY_GPU, behaviour=NARROW)
        assert loaded(played) == 0
        assert laws(played) == {"HIT-ATTAINABLE": 1}

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal", NARROW])
    def test_one_boundary_and_one_drop(self, behaviour: str) -> None:
        played = play(tier(*self.MARKED, speculative=MTP), resent(300), EMPTY_GPU, behaviour=behaviour)
        assert loaded(played) == 256
        assert not played.violations

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_on_the_gpu_too(self, behaviour: str) -> None:
        """The incident's own numbers: of a prompt of 1,024 tokens that is sent again at least 512 are hit."""
        config = tier(*self.MARKED, speculative=replace(MTP, num_speculative_tokens=2))
        played = play(config, resent(1024), behaviour=behaviour)
        (first, *_) = played.of("request.scheduled", request_id="b")
        assert first.num_blocks is not None
        assert first.num_blocks - loaded(played) >= 512
        assert not played.violations


THREE_DRAFTS = SpeculativeConfig(num_speculative_tokens=3, method="mtp", draft_pass_ns=0)
IGNORED = "vllm-0.33 load_lookahead=ignored"


@pytest.mark.incident("A1")
class TestA1LookaheadIsOnlyAskedForWhenTheLoadHasLanded:
    """vllm#57104: two loads fill the pool; the step after them needs a block more for drafts, and nobody gives way.

    Blocks of 4 tokens, 7 of them; prompts of 16 and 12 tokens are loaded whole.
    """

    def over_mooncake(self, behaviour: str) -> Play:
        base = sized(pair(), num_gpu_blocks=8, max_model_len=20, budget=32)
        decode = replace(base.roles["decode"], speculative=THREE_DRAFTS)
        prefill = replace(base.roles["prefill"], cache=replace(base.roles["prefill"].cache, num_gpu_blocks=40))
        both = workload(
            request("a", prompt_tokens=16, output_tokens=3), request("b", prompt_tokens=12, output_tokens=3)
        )
        return play(replace(base, roles={"prefill": prefill, "decode": decode}), both, behaviour=behaviour)

    def from_the_cpu(self, behaviour: str) -> Play:
        base = sized(offloading(), num_gpu_blocks=8, max_model_len=20, budget=32)
        engine = replace(base.roles["engine"], speculative=THREE_DRAFTS)
        prompts = {"a": (16, "abcd"), "b": (12, "efg")}
        clients = workload(
            *(
                request(f"{name}{place}", at_ms, prompt_tokens=tokens, output_tokens=1, text=text)
                for place, at_ms in enumerate((0, 1000))
                for name, (tokens, text) in prompts.items()
            )
        )
        return play(replace(base, roles={"engine": engine}), clients, EMPTY_GPU, behaviour=behaviour)

    @pytest.mark.parametrize("how", ["over_mooncake", "from_the_cpu"])
    def test_before_the_fix_both_wait_for_ever(self, how: str) -> None:
        played: Play = getattr(self, how)(IGNORED)
        stalled = played.of("request.stalled")
        assert {event.request_id for event in stalled} == ({"a", "b"} if how == "over_mooncake" else {"a1", "b1"})
        assert {(event.cause, event.num_blocks) for event in stalled} == {("a turn to run", 4), ("a turn to run", 3)}

    @pytest.mark.parametrize("how", ["over_mooncake", "from_the_cpu"])
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_after_it_the_second_load_waits(self, how: str, behaviour: str) -> None:
        played: Play = getattr(self, how)(behaviour)
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        assert not played.violations
        starts = [event.time_ns // NS_PER_MS for event in played.of("load.started")]
        assert len(starts) == 2
        assert starts[1] - starts[0] > 1


@pytest.mark.incident("K5")
class TestK5ProducerAndConsumerDisagree:
    """vllm#49230, sglang#30222: only the consumer has a drafter, and with it a group more. Refused at the pull,
    whatever the prompt's length."""

    @pytest.mark.parametrize("num_tokens", [32, 320])
    @pytest.mark.parametrize(("behaviour", "recompute"), [("vllm-0.33", False), ("vllm-0.33", True), ("ideal", True)])
    def test_the_pull_fails_and_the_policy_decides(self, num_tokens: int, behaviour: str, *, recompute: bool) -> None:
        config = sized(pair(), num_gpu_blocks=200, max_model_len=400)
        decode = replace(config.roles["decode"], speculative=MTP)
        config = replace(config, roles={**config.roles, "decode": decode})
        text = [f"t{place}" for place in range(80)]
        client = workload(request("a", prompt_tokens=num_tokens, output_tokens=4, text=text))
        played = play(config, client, "mooncake.group-mismatch", behaviour=behaviour, recompute=recompute)
        assert played.ends()["a"][0] == ("finished" if recompute else "failed")
        assert [event.cause for event in played.of("pull.settled")] == ["KV group count mismatch"]
        assert not played.of("engine.crashed")
        assert not played.violations
