"""Mooncake with several KV cache groups: what a failed pull costs depends on two fixes, and on their order.

vllm#50984 makes the connector report a failure; vllm#50388 lets a scheduler with several groups hear of one.
"""

from dataclasses import replace

import pytest

from kvreplay.ids import NS_PER_MS, NULL_BLOCK_ID
from kvreplay.kv.specs import (
    CIRCULAR_BUFFER,
    MAMBA,
    MAMBA_ALIGN,
    MLA,
    SLIDING_WINDOW,
    SLIDING_WINDOW_MLA,
    KVCacheGroupSpec,
)
from kvreplay.replay.config import ReplayConfig
from tests.scenarios.stage import BLOCK, Sizes, pair, play, request, role, workload

_FULL = KVCacheGroupSpec(block_size=BLOCK, bytes_per_token=8)
WINDOWS = (_FULL, KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=BLOCK, sliding_window=8, bytes_per_token=8))
STATES = (_FULL, KVCacheGroupSpec(kind=MAMBA, mamba_cache_mode=MAMBA_ALIGN, block_size=BLOCK, state_bytes=32))

OTHER_BLOCKS = (
    KVCacheGroupSpec(block_size=2 * BLOCK, bytes_per_token=4),
    KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=BLOCK, sliding_window=8, bytes_per_token=8),
)

TWO = workload(request("a", prompt_tokens=20), request("b", 5, prompt_tokens=24))
FAULT = "error-response:request=a"
SILENT, REPORT = "mooncake_failure=silent", "mooncake_failure=report"
OLD, FIXED = "hybrid_failure=unpack_crash", "hybrid_failure=whole_request"


def hybrid(groups: tuple[KVCacheGroupSpec, ...], ranks: tuple[Sizes, Sizes] = ((1, 1), (1, 1))) -> ReplayConfig:
    config = pair(ranks=ranks)
    return replace(config, model=replace(config.model, groups=groups))


@pytest.mark.parametrize("groups", [WINDOWS, STATES], ids=["windows", "states"])
@pytest.mark.parametrize("ranks", [((1, 1), (1, 1)), ((4, 1), (2, 1)), ((1, 2), (1, 1))], ids=str)
def test_a_good_pull_moves_every_group(groups: tuple[KVCacheGroupSpec, ...], ranks: tuple[Sizes, Sizes]) -> None:
    played = play(hybrid(groups, ranks), TWO)
    assert {name: end[0] for name, end in played.ends().items()} == {"a": "finished", "b": "finished"}
    assert played.violations == []
    assert {event.cause for event in played.of("tokens.recomputed", instance="D0")} <= {"full-hit-last-token"}


@pytest.mark.parametrize("groups", [WINDOWS, STATES], ids=["windows", "states"])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize(
    ("switches", "a", "crash"),
    [
        (f"{SILENT} {OLD}", "stalled", None),
        (f"{REPORT} {OLD}", "failed", "ValueError"),
        (f"{REPORT}", "failed", "RuntimeError"),
        (f"{REPORT} {FIXED}", None, None),
        ("", None, None),
    ],
    ids=["neither", "only-50984", "50984-in-0.33", "both", "0.33"],
)
def test_the_order_of_the_fixes_matters(
    groups: tuple[KVCacheGroupSpec, ...], recompute: bool, switches: str, a: str | None, crash: str | None
) -> None:
    """With #50984 alone, what was a stall of one request is the death of its engine."""
    played = play(hybrid(groups), TWO, FAULT, behaviour=f"vllm-0.33 {switches}", recompute=recompute)
    ends = {name: end[0] for name, end in played.ends().items()}
    assert ends["a"] == (a or ("finished" if recompute else "failed"))
    assert [(event.instance, event.status) for event in played.of("engine.crashed")] == (
        [("D0", crash)] if crash else []
    )
    assert (ends["b"] == "finished") == (crash is None)


@pytest.mark.parametrize("groups", [WINDOWS, STATES], ids=["windows", "states"])
@pytest.mark.parametrize("ranks", [((1, 1), (1, 1)), ((4, 1), (2, 1))], ids=str)
@pytest.mark.parametrize("fault", [FAULT, "corrupt:request=a", "mooncake.engine-partial:request=a,nth=1", "timeout"])
def test_ideally_everybody_finishes(
    groups: tuple[KVCacheGroupSpec, ...], ranks: tuple[Sizes, Sizes], fault: str
) -> None:
    played = play(hybrid(groups, ranks), TWO, fault, behaviour="ideal", recompute=True)
    assert {name: end[0] for name, end in played.ends().items()} == {"a": "finished", "b": "finished"}
    assert played.violations == []


def test_what_a_load_has_brought_of_uncached_groups_is_gone_with_the_blocks() -> None:
    """b is preempted for want of blocks, hits what the cache has, and computes the window before that again."""
    groups = (
        KVCacheGroupSpec(kind=MLA, block_size=8, tokens_per_state=4, bytes_per_token=1),
        KVCacheGroupSpec(
            kind=SLIDING_WINDOW_MLA, block_size=4, sliding_window=8, bounded_replay=True, bytes_per_token=2
        ),
        KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4, bytes_per_token=2),
    )
    small = role(num_gpu_blocks=15, max_num_batched_tokens=8, max_num_seqs=2, async_scheduling=False)
    config = pair()
    config = replace(config, model=replace(config.model, groups=groups), roles=dict.fromkeys(config.roles, small))
    clients = workload(
        request("a", prompt_tokens=11, output_tokens=15), request("b", 5, prompt_tokens=13, output_tokens=20)
    )
    played = play(config, clients)
    assert [event.request_id for event in played.of("request.preempted")] == ["b"]
    assert played.violations == []
    assert {end[0] for end in played.ends().values()} == {"finished"}


@pytest.mark.parametrize(("groups", "num_gpu_blocks"), [(WINDOWS, 33), (STATES, 28)], ids=["windows", "states"])
def test_what_a_window_has_left_behind_is_in_no_transfer(
    groups: tuple[KVCacheGroupSpec, ...], num_gpu_blocks: int
) -> None:
    """a's blocks are on their way for long, and those that its window, or its state, had left go to b meanwhile."""
    small = role(num_gpu_blocks=num_gpu_blocks, max_num_batched_tokens=8)
    config = hybrid(groups)
    network = replace(config.network, latency_ns=300 * NS_PER_MS)
    config = replace(config, roles=dict.fromkeys(config.roles, small), network=network)
    played = play(config, workload(request("a", prompt_tokens=40), request("b", 950, prompt_tokens=60)))
    (sent,) = played.of("send.started", request_id="a")
    (over,) = played.of("send.finished", request_id="a")
    left = [event for event in played.of("block.freed", request_id="a", instance="P0") if event.cause == "window"]
    handed_over = {
        block_id
        for event in played.of("block.allocated", instance="P0", request_id="b")
        if sent.time_ns <= event.time_ns < over.time_ns
        for block_id in event.block_ids or ()
    }
    assert handed_over & {block_id for event in left for block_id in event.block_ids or ()}
    assert played.broken_laws() == []
    assert played.violations == []


@pytest.mark.parametrize("groups", [WINDOWS, STATES, OTHER_BLOCKS], ids=["windows", "states", "other blocks"])
def test_every_block_that_a_request_is_given_it_gives_back(groups: tuple[KVCacheGroupSpec, ...]) -> None:
    played = play(hybrid(groups), workload(request("a", prompt_tokens=40, output_tokens=20)))
    for instance in ("P0", "D0"):
        rows = {
            kind: sorted(
                (event.group, block_id)
                for event in played.of(kind, instance=instance, request_id="a")
                for block_id in event.block_ids or ()
                if block_id != NULL_BLOCK_ID
            )
            for kind in ("block.allocated", "block.freed")
        }
        assert rows["block.allocated"]
        assert rows["block.allocated"] == rows["block.freed"]
