"""Public incidents of blocks that are taken for what they are not: another's, none at all, or a state that is not
there."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from kvreplay.errors import ConfigError
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, KVCacheGroupSpec
from tests.incidents.clusters import BLOCK, FULL, crashes, laws, sized
from tests.scenarios.offload_stage import offloading
from tests.scenarios.stage import Play, play, request, role, single, workload

TEXT = [f"t{place}" for place in range(64)]


@pytest.mark.incident("P1")
class TestP1TheSameTokensOfAnother:
    """vllm#44250, vllm#45549, sglang#24638: 64 tokens with adapter A, with adapter B, and with a salt that is called A.

    An adapter is a namespace: what it computes for the same tokens is something else.
    """

    def play(self, behaviour: str) -> Play:
        asked: dict[str, dict[str, Any]] = {
            "a": {"namespace": "A"},
            "b": {"namespace": "B"},
            "s": {"cache_salt": "A"},
            "p": {},
            "again": {"namespace": "A"},
        }
        clients = [
            request(name, place * 400, prompt_tokens=64, text=TEXT, **params)
            for place, (name, params) in enumerate(asked.items())
        ]
        gone = [f"cache.reset:at={place * 400 - 100}ms,what=gpu,id={place}" for place in range(1, 5)]
        config = sized(offloading(), 20, max_model_len=100)
        return play(config, workload(*clients), *gone, behaviour=behaviour)

    def loaded(self, played: Play) -> dict[str | None, int | None]:
        return {event.request_id: event.num_tokens for event in played.of("load.started")}

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_only_its_own_is_found(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert not played.violations
        assert self.loaded(played) == {"again": 64}

    def test_known_by_its_tokens_alone_everybody_gets_the_first_ones(self) -> None:
        played = self.play("vllm-0.33 offload_keys=tokens")
        assert self.loaded(played) == dict.fromkeys(("b", "s", "p", "again"), 64)
        assert laws(played) == {"CONTENT"}
        assert {event.request_id for event in played.violations} == {"b", "s", "p"}
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}  # and nobody is told


@pytest.mark.incident("J3")
class TestJ3AttentionIsThereAndTheStateIsNot:
    """vllm#41712: of 150 tokens attention has 144 in the tier, and the state is there after 64 and 192 only."""

    GROUPS = (
        KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=4),
        KVCacheGroupSpec(kind=MAMBA, block_size=64, mamba_cache_mode=MAMBA_ALIGN, state_bytes=64),
    )

    def play(self, behaviour: str) -> Play:
        """Of each prompt the last state is kept: after 64 tokens of 76, after 192 of 210."""
        config = sized(offloading(cpu_chunks=400), 100, max_model_len=400, groups=self.GROUPS)
        clients = workload(
            request("a", 0, prompt_tokens=76, text=TEXT),
            request("w", 300, prompt_tokens=210, text=TEXT),
            request("b", 1000, prompt_tokens=150, text=TEXT),
        )
        return play(config, clients, "cache.reset:at=900ms,what=gpu", behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_a_hit_ends_where_both_go_on(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert not played.violations
        assert [event.num_tokens for event in played.of("load.finished", request_id="b")] == [64]
        assert played.ends()["b"][0] == "finished"

    def test_else_it_is_to_load_a_state_that_nobody_has(self) -> None:
        played = self.play("vllm-0.33 offload_hit_groups=attention")
        assert [event.num_tokens for event in played.of("lookup", request_id="b")] == [128]
        assert crashes(played) == [("E0", "chunk not found in cache")]


@pytest.mark.incident("J4")
class TestJ4Block0IsGivenOut:
    """kvcached#398, LMCache#2984: a pool that knows nothing of the null block gives it to a request.

    No config of kvreplay's has such a pool: block 0 counts as one of its blocks, and is nobody's.
    """

    @pytest.fixture
    def elastic(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Whoever is first to get blocks gets block 0 in the place of block 1."""
        real = BlockPool.get_new_blocks

        def from_zero(self: BlockPool, count: int) -> BlockIds:
            block_ids = real(self, count)
            return np.where(block_ids == 1, 0, block_ids)

        monkeypatch.setattr(BlockPool, "get_new_blocks", from_zero)

    @pytest.mark.usefixtures("elastic")
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_a_block_that_is_entered_into_the_cache_is_found(self, behaviour: str) -> None:
        played = play(single(), workload(request("a")), behaviour=behaviour)
        assert ("NULL-BLOCK", "the null block holds a prefix-cache key") in {
            (event.status, event.cause) for event in played.violations
        }

    @pytest.mark.usefixtures("elastic")
    def test_a_state_that_is_computed_into_it_is_found(self) -> None:
        groups = (FULL, KVCacheGroupSpec(kind=MAMBA, block_size=BLOCK, mamba_cache_mode=MAMBA_ALIGN, state_bytes=16))
        config = sized(single(), 20, groups=groups[::-1])
        played = play(config, workload(request("a", prompt_tokens=20)))
        assert ("NULL-BLOCK", "position 0 was computed into the null block", 0) in {
            (event.status, event.cause, event.group) for event in played.violations
        }

    def test_else_it_is_nobodys(self) -> None:
        played = play(single(), workload(request("a"), request("b", 100, prompt_tokens=60)))
        assert not played.violations
        assert not any(0 in (event.block_ids or ()) for event in played.of("block.allocated"))

    def test_a_pool_of_block_0_alone_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"cache\.num_gpu_blocks must be >= 2, got 1"):
            role(num_gpu_blocks=1)
        small = replace(single().roles["engine"].cache, num_gpu_blocks=16)
        with pytest.raises(ConfigError, match="16 blocks, one of them the null block, cannot hold one request"):
            replace(single(), roles={"engine": replace(single().roles["engine"], cache=small)})
