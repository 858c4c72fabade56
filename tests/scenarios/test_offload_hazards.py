"""What 0.33.0's offloading connector does wrong by itself, and public incidents of its kind: a finding with the
behaviour switched on, none with it off, none under `ideal`.

Hazards H1 to H7 are those found in the real code beside the vectors; the incidents' ids are vLLM's.
"""

from dataclasses import replace

import pytest

from kvreplay.behaviour import profile
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.events import DETAIL_BLOCKS
from kvreplay.faults.plan import make_plan
from kvreplay.ids import NS_PER_MS, NS_PER_S
from kvreplay.kv.specs import CIRCULAR_BUFFER, MAMBA, MAMBA_ALIGN, SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.cluster import Cluster, RunSettings
from kvreplay.replay.config import ConnectorConfig, ReplayConfig
from kvreplay.replay.offload import Offload
from kvreplay.replay.simple_cpu import SimpleCpu
from kvreplay.trace.workload import Workload
from tests.list_sink import ListSink
from tests.scenarios.offload_stage import TEXT, hybrid, offloading, there_and_back
from tests.scenarios.stage import Play, play, request, role, single, workload

FULL = KVCacheGroupSpec(block_size=4, bytes_per_token=1)
STATES = KVCacheGroupSpec(kind=MAMBA, block_size=4, mamba_cache_mode=MAMBA_ALIGN, state_bytes=4)
WIDE = KVCacheGroupSpec(block_size=16, bytes_per_token=1)
ONE = [f"a{place}" for place in range(32)]
OTHER = [f"x{place}" for place in range(32)]


def window(size: int) -> KVCacheGroupSpec:
    return KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=size, bytes_per_token=1)


def played_with(config: ReplayConfig, requests: Workload, *inject: str, **switches: str) -> Play:
    """`play`, with these switches on top of 0.33.0."""
    behaviour = profile("vllm-0.33")
    for name, value in switches.items():
        behaviour = behaviour.with_switch(f"{name}={value}")
    sink = ListSink(DETAIL_BLOCKS)
    settings = RunSettings(config=config, behaviour=behaviour, recompute=True, plan=make_plan(inject))
    cluster = Cluster(settings, requests, sink)
    cluster.run()
    return Play(cluster, sink)


def crashes(played: Play) -> list[tuple[str | None, str | None]]:
    return [(event.status, event.cause) for event in played.of("engine.crashed")]


def checkers(played: Play) -> set[str | None]:
    return {event.status for event in played.violations}


def all_finish(played: Play) -> bool:
    return all(end == "finished" for end, _, _ in played.ends().values()) and not played.violations


# -- hazards ----------------------------------------------------------------------------------------------------


class TestH1ResetOfTheConnectorAlone:
    """A running request offers everything again, from block ids that its window has left."""

    def play(self, behaviour: str, blocks_per_chunk: int) -> Play:
        """`x` has got blocks of `a` by the time of the reset; `b` loads what was stored from them."""
        requests = workload(
            request("a", 0, prompt_tokens=26, output_tokens=14, text=ONE),
            request("x", 15, prompt_tokens=10, output_tokens=12, text=OTHER),
            request("b", 600, prompt_tokens=17, output_tokens=2, text=ONE),
        )
        config = hybrid(window(8), num_gpu_blocks=9, budget=8, blocks_per_chunk=blocks_per_chunk)
        faults = ("cache.reset:at=62ms,what=connector", "cache.reset:at=500ms")
        return play(config, requests, *faults, behaviour=behaviour)

    @pytest.mark.parametrize("blocks_per_chunk", [1, 2])
    def test_foreign_bytes_are_stored_and_served(self, blocks_per_chunk: int) -> None:
        played = self.play("vllm-0.33", blocks_per_chunk)
        assert checkers(played) == {"STORE-CONTENT", "CONTENT"}
        assert {event.request_id for event in played.violations if event.status == "CONTENT"} == {"b"}

    def test_the_same_id_twice_in_one_job_is_fatal(self) -> None:
        config = hybrid(window(8), num_gpu_blocks=7, budget=8)
        requests = workload(request("a", 0, prompt_tokens=40, output_tokens=8, text=ONE))
        fault = "cache.reset:at=38ms,what=connector"
        assert crashes(play(config, requests, fault)) == [("KeyError", "2")]
        assert all_finish(play(config, requests, fault, behaviour="ideal"))

    @pytest.mark.parametrize("blocks_per_chunk", [1, 2])
    def test_ideal_stores_what_is_still_there(self, blocks_per_chunk: int) -> None:
        played = self.play("ideal", blocks_per_chunk)
        assert all_finish(played)
        assert not played.of("load.started", request_id="b")


class TestH2ALastLookAtTheTail:
    """At its end a request offers the last part of its window again, of which `x` has got a block in this very step."""

    def play(self, behaviour: str) -> Play:
        requests = workload(
            request("a", 0, prompt_tokens=70, output_tokens=10, text=ONE),
            request("x", 135, prompt_tokens=20, output_tokens=2, text=OTHER),
        )
        config = hybrid(
            WIDE, window(8), num_gpu_blocks=24, max_model_len=128, budget=16, cpu_chunks=200, offload_prompt_only=False
        )
        return play(config, requests, behaviour=behaviour)

    def test_foreign_bytes_are_stored(self) -> None:
        (finding,) = self.play("vllm-0.33").violations
        assert (finding.status, finding.request_id, finding.group) == ("STORE-CONTENT", "a", 1)

    def test_ideal_stores_none(self) -> None:
        assert all_finish(self.play("ideal"))


class TestH3AClientsLimitBelowAPartialTail:
    """`max_offload_tokens` is asserted where it should be obeyed."""

    def play(self, behaviour: str) -> Play:
        config = hybrid(
            KVCacheGroupSpec(block_size=8, bytes_per_token=1),
            KVCacheGroupSpec(kind=MAMBA, block_size=8, mamba_cache_mode=MAMBA_ALIGN, state_bytes=8),
            num_gpu_blocks=60,
            budget=64,
            prefix_match_unit=4,
        )
        limits = {"max_offload_tokens": 9}
        requests = workload(
            request("a", 0, prompt_tokens=30, output_tokens=6, text=ONE, kv_transfer_params=limits),
            request("b", 400, prompt_tokens=30, output_tokens=6, text=ONE),
        )
        return play(config, requests, "cache.reset:at=300ms", behaviour=behaviour)

    def test_the_engine_dies(self) -> None:
        assert crashes(self.play("vllm-0.33")) == [
            ("AssertionError", "_build_partial_tail_store_jobs: boundary <= max_boundary")
        ]

    def test_ideal_leaves_the_tail_out(self) -> None:
        assert all_finish(self.play("ideal"))


class TestH4PromotionsEvictEachOther:
    """Chunks are promoted one by one, each at the expense of what the same lookup has found."""

    def play(self, behaviour: str, *more_faults: str) -> Play:
        config = offloading(cpu_chunks=5, num_gpu_blocks=18, spec_name="TieringOffloadingSpec", tier_latency=1e-4)
        requests = workload(
            request("a", 0, prompt_tokens=16, text=ONE),
            request("x", 60, prompt_tokens=16, text=OTHER),
            request("b", 125, prompt_tokens=16, text=ONE, kv_transfer_params={"kv_load_tiers": []}),
            request("c", 155, prompt_tokens=16, text=OTHER),
        )
        return play(config, requests, "cache.reset:at=110ms", *more_faults, behaviour=behaviour, recompute=True)

    @pytest.mark.parametrize("what", ["connector", "both"])
    def test_it_is_left_alone_until_something_changes(self, what: str) -> None:
        """An hour of circles is not played turn by turn; when there is room, the lookup comes through."""
        played = self.play("vllm-0.33", f"cache.reset:at=3600s,what={what}")
        assert all_finish(played)
        (load,) = played.of("load.started", request_id="c")
        assert 3600.0 < load.time_ns / NS_PER_S < 3600.1
        assert load.num_tokens == 16
        assert played.cluster.loop.num_run < 20_000

    def test_what_leaves_the_tier_as_it_is_ends_no_circle(self) -> None:
        played = self.play("vllm-0.33", "cache.reset:at=3600s")
        assert [event.request_id for event in played.of("request.stalled")] == ["c"]
        assert played.cluster.loop.num_run < 20_000

    def test_the_request_waits_for_ever_though_its_chunks_would_fit(self) -> None:
        played = self.play("vllm-0.33")
        assert [(event.request_id, event.cause) for event in played.of("request.stalled")] == [
            ("c", "progress: its lookup keeps the connector busy, and is never decided")
        ]

    def test_ideal_keeps_what_it_has_found(self) -> None:
        played = self.play("ideal")
        assert all_finish(played)
        assert [event.num_tokens for event in played.of("load.started", request_id="c")] == [16]


class TestH5AWindowOfWholeBlocksAndOneToken:
    """One chunk less is stored than a lookup asks for: stored, never served."""

    def play(self, behaviour: str, size: int) -> Play:
        requests = workload(
            request("a", 0, prompt_tokens=70, output_tokens=14, text=ONE),
            request("b", 400, prompt_tokens=70, text=ONE),
        )
        groups = (WIDE, window(size))
        config = hybrid(*groups, num_gpu_blocks=80, max_model_len=128, budget=128, offload_prompt_only=False)
        return play(config, requests, "cache.reset:at=300ms", behaviour=behaviour)

    def test_it_is_never_served(self) -> None:
        played = self.play("vllm-0.33", 5)
        (finding,) = played.violations
        assert (finding.status, finding.request_id, finding.group) == ("HIT-ATTAINABLE", "b", 1)
        assert not played.of("load.started")

    @pytest.mark.parametrize(("behaviour", "size"), [("ideal", 5), ("vllm-0.33", 8), ("vllm-0.33", 6)])
    def test_served(self, behaviour: str, size: int) -> None:
        """Where all that is asked for is stored: under `ideal`, and in windows of other sizes."""
        played = self.play(behaviour, size)
        assert all_finish(played)
        assert [event.num_tokens for event in played.of("load.started")] == [64]


class TestH7ResetOfRunningRequestsDuringALoad:
    def play(self, behaviour: str) -> Play:
        requests = there_and_back()
        config = offloading(load_bytes_per_s=100)  # 160 ms
        return play(config, requests, "cache.reset:at=450ms,what=running", behaviour=behaviour)

    def test_the_engine_dies(self) -> None:
        ((exception, message),) = crashes(self.play("vllm-0.33"))
        assert exception == "RuntimeError"
        assert message is not None
        assert message.startswith("Failed to reset KV cache")

    def test_ideal_refuses(self) -> None:
        assert all_finish(self.play("ideal"))


# -- incidents --------------------------------------------------------------------------------------------------


@pytest.mark.incident("I1")
class TestI1ReadmittedWhileItsStoresAreInFlight:
    """vllm#46014: preempted while its chunks are being stored, it finds them and is to load them."""

    def play(self, **switches: str) -> Play:
        config = offloading(num_gpu_blocks=40)
        requests = workload(
            request("a", 0, prompt_tokens=8, text="ab"),
            request("r", 200, prompt_tokens=16, output_tokens=6, text=TEXT, kv_transfer_params={"max_load_tokens": 8}),
        )
        # It wants two of its chunks, which are there, while the two others are being stored.
        reset = "cache.reset:at=215ms,what=running"
        faults = ("cache.reset:at=150ms", "offload.store-slow:request=r,delay=2s", reset)
        return played_with(config, requests, *faults, **switches)

    def test_before_the_fix(self) -> None:
        ((exception, message),) = crashes(self.play(offload_readmission="ask"))
        assert (exception, message) == ("AssertionError", "update_state_after_alloc: not req_status.transfer_jobs")

    def test_it_waits(self) -> None:
        played = self.play()
        assert all_finish(played)


@pytest.mark.incident("E4")
class TestAbortedBeforeItHadBlocks:
    """vllm#49146: it has keys for its whole prompt, and no blocks to store."""

    def play(self, **switches: str) -> Play:
        requests = workload(
            request("a", 0, prompt_tokens=16, output_tokens=30),
            request("q", 20, prompt_tokens=60),
            aborts=[("q", 60)],
        )
        return played_with(offloading(), requests, **switches)

    def test_before_the_fix(self) -> None:
        ((exception, message),) = crashes(self.play(offload_abort_clamp="none"))
        assert exception == "AssertionError"
        assert message is not None
        assert message.startswith("_build_store_jobs")

    def test_nothing_is_stored_of_it(self) -> None:
        played = self.play()
        assert not crashes(played)
        assert not played.of("store.started", request_id="q")


class TestStoresOfAStepThatComputesNothing:
    """vllm#41945: the step after the last request's end has no forward pass."""

    def play(self, **switches: str) -> Play:
        """There is no room when its chunks are offered, and there is when it ends."""
        requests = there_and_back()
        short = replace(requests.arrivals[0], output_tokens=1)
        again = workload(short, *requests.arrivals[1:])
        return played_with(offloading(), again, "offload.alloc-fail:request=a,nth=1", **switches)

    def test_before_the_fix_their_chunks_stay_pending(self) -> None:
        played = self.play(offload_no_forward="drop")
        assert [(event.request_id, event.cause) for event in played.of("request.stalled")] == [
            ("b", "an undecided lookup")
        ]

    def test_they_are_carried_out(self) -> None:
        played = self.play()
        assert all_finish(played)
        assert len(played.of("store.finished")) == len(played.of("store.started"))


@pytest.mark.incident("I2")
class TestI2ResumedWithAPartOfItsTable:
    """vllm#52170: two blocks a chunk, preempted in the middle of its prompt, resumed with a local hit."""

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_each_chunk_is_stored_once_and_right(self, behaviour: str) -> None:
        config = offloading(num_gpu_blocks=40, blocks_per_chunk=2, scheduler={"max_num_batched_tokens": 8})
        requests = workload(
            request("r", 0, prompt_tokens=32, text="abcdefgh"),
            request("f", 400, prompt_tokens=60),
            request("g", 700, prompt_tokens=60),
            request("h", 1000, prompt_tokens=60),
            request("b", 1500, prompt_tokens=33, text="abcdefghi"),
        )
        played = play(config, requests, "scheduler.preempt:request=r,at=store.finished", behaviour=behaviour)
        assert all_finish(played)
        assert [event.num_tokens for event in played.of("load.started", request_id="b")] == [32]
        assert sum(event.num_blocks or 0 for event in played.of("store.started", request_id="r")) == 8


@pytest.mark.incident("I4")
class TestI4TheBoundary:
    """vllm#52807: 16 tokens computed, 16 to load, and a state that lies below the mark without a hash."""

    CONFIG = hybrid(
        KVCacheGroupSpec(block_size=16, bytes_per_token=1),
        KVCacheGroupSpec(kind=MAMBA, block_size=16, mamba_cache_mode=MAMBA_ALIGN, state_bytes=16),
        num_gpu_blocks=8,
        budget=16,
    )
    REQUESTS = workload(
        request("a", 0, prompt_tokens=33, text=ONE),
        request("w", 100, prompt_tokens=17, text=ONE[:4] + OTHER),  # keeps the first block and state warm
        request("f", 200, prompt_tokens=20),
        request("b", 400, prompt_tokens=33, text=ONE),
    )

    def play(self, behaviour: str) -> Play:
        return play(self.CONFIG, self.REQUESTS, behaviour=behaviour)

    def test_before_the_fix_the_engine_dies(self) -> None:
        assert crashes(self.play("pre-offload-boundary")) == [
            ("AssertionError", "update_state_after_alloc: load starts below the computed tokens")
        ]

    @pytest.mark.parametrize("behaviour", ["post-offload-boundary", "vllm-0.33", "ideal"])
    def test_only_the_right_blocks_are_loaded(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert all_finish(played)
        assert [(event.num_tokens, event.status) for event in played.of("load.started")] == [(16, "CPU")]


@pytest.mark.incident("I6")
class TestI6AGroupThatNoCacheHolds:
    """vllm#55038: a ring of four tokens beside blocks of sixteen is not offloaded, and not missed."""

    def test_served(self) -> None:
        ring = KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4, bytes_per_token=1)
        config = hybrid(WIDE, ring, num_gpu_blocks=40)
        requests = workload(
            request("a", 0, prompt_tokens=40, text=ONE),
            request("b", 400, prompt_tokens=40, text=ONE),
        )
        played = play(config, requests, "cache.reset:at=300ms")
        assert all_finish(played)
        assert played.of("load.started", request_id="b")


@pytest.mark.incident("O1")
class TestO1TwoRequestsPromoteIntoATierWithoutRoomForBoth:
    """LMCache#2951: each gets a part and waits for the rest."""

    def play(self, behaviour: str) -> Play:
        config = offloading(cpu_chunks=4, spec_name="TieringOffloadingSpec", tier_latency=1e-3)
        requests = workload(
            request("a", 0, prompt_tokens=12, text=ONE),
            request("x", 100, prompt_tokens=12, text=OTHER),
            request("f", 200, prompt_tokens=16),
            request("b", 500, prompt_tokens=13, text=ONE),
            request("c", 500, prompt_tokens=13, text=OTHER),
        )
        return play(config, requests, "cache.reset:at=400ms", behaviour=behaviour, recompute=True)

    def test_ideal_serves_both(self) -> None:
        played = self.play("ideal")
        assert all_finish(played)
        (node,) = played.cluster.nodes
        assert isinstance(node.offload, Offload)
        assert not (node.offload.cpu.chunks.ref_counts > 0).any()  # no pin is left


@pytest.mark.incident("H4")
class TestH4RanksWithDifferentChunks:
    """LMCache#1467: of four ranks one has less. A chunk counts when every rank has it, and for none if one failed."""

    def play(self, fault: str, behaviour: str) -> Play:
        """The second half of the prompt of `a` is a job of its own."""
        config = offloading(scheduler={"max_num_batched_tokens": 8})
        config = replace(config, topology=replace(config.topology, tp=4))
        return play(config, there_and_back(), fault, behaviour=behaviour, recompute=True)

    def test_what_one_rank_failed_to_store_no_rank_loads(self) -> None:
        fault = "offload.store-dma-fail:request=a,rank=2,nth=2"
        played = self.play(fault, "ideal")
        assert all_finish(played)
        assert [event.num_tokens for event in played.of("load.started", request_id="b")] == [8]
        assert crashes(self.play(fault, "vllm-0.33"))[0][0] == "AssertionError"

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_what_one_rank_has_not_reported_is_waited_for(self, behaviour: str) -> None:
        played = self.play("offload.ack-late:request=a,rank=2,nth=2,delay=900ms", behaviour)
        assert all_finish(played)
        (load,) = played.of("load.started", request_id="b")
        assert load.num_tokens == 16
        assert load.time_ns > 900 * NS_PER_MS


@pytest.mark.incident("H2")
class TestH2LookedUpAgainAndAgainAndThenAborted:
    """vllm#42372: what a lookup has pinned is let go by the next one, and by an abort."""

    def test_nothing_stays_pinned(self) -> None:
        connector = ConnectorConfig(kind="simple_cpu", options=SimpleCpuConfig(cpu_bytes_to_use=64 * 4))
        config = replace(single(role(num_gpu_blocks=17)), connector=connector)
        requests = workload(
            request("a", 0, prompt_tokens=16, text=TEXT),
            request("f", 100, prompt_tokens=48, output_tokens=14),  # leaves no room for `b`
            request("b", 150, prompt_tokens=16, text=TEXT),
            aborts=[("b", 220)],
        )
        played = play(config, requests)
        assert not played.violations
        assert played.ends()["b"][0] == "aborted"
        # The head of its prompt came back to the free queue first, and is gone from the GPU.
        assert [event.num_tokens for event in played.of("lookup", request_id="b")] == [12]
        assert not played.of("load.started", request_id="b")
        (node,) = played.cluster.nodes
        assert isinstance(node.offload, SimpleCpu)
        pool = node.offload.scheduler.pool
        assert pool.num_cached_keys >= 4
        assert not (pool.ref_counts[1:] > 0).any()


@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_without_a_prefix_cache_chunks_of_groups_with_other_blocks_are_found(behaviour: str) -> None:
    """Their hashes are those of the smallest block, though no block in the GPU has one."""
    groups = (
        KVCacheGroupSpec(block_size=8, bytes_per_token=1),
        KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8, bytes_per_token=2),
    )
    config = offloading(*groups, num_gpu_blocks=40)
    own = replace(config.roles["engine"], cache=replace(config.roles["engine"].cache, enable_prefix_caching=False))
    config = replace(config, roles={"engine": own})
    clients = workload(
        request("a", prompt_tokens=26, text="abcdefg"), request("b", 500, prompt_tokens=27, text="abcdefg")
    )
    played = play(config, clients, behaviour=behaviour)
    assert played.violations == []
    loads = [(event.request_id, event.num_tokens, event.status) for event in played.of("load.started")]
    assert loads == [("b", 24, "CPU")]
