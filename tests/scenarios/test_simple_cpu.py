"""SimpleCPUOffloadConnector: a pool of CPU blocks, one copy thread, and no word of what goes wrong."""

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvreplay.behaviour import profile
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.connectors.simple_cpu.lazy_stores import blocks_ahead
from kvreplay.engine.config import SpeculativeConfig
from kvreplay.errors import ConfigError
from kvreplay.events import DETAIL_BLOCKS
from kvreplay.faults.plan import make_plan
from kvreplay.kv.specs import CIRCULAR_BUFFER, MAMBA, SLIDING_WINDOW, KVCacheGroupSpec
from kvreplay.replay.cluster import Cluster, RunSettings
from kvreplay.replay.config import ConnectorConfig, ReplayConfig, Role, RoleConfig
from kvreplay.replay.config_load import config_from_json
from kvreplay.replay.simple_cpu import SimpleCpu
from tests.list_sink import ListSink
from tests.scenarios.offload_stage import STATES, there_and_back
from tests.scenarios.speculative_worlds import with_drafts
from tests.scenarios.stage import Play, both_ways, judge, play, request, role, single, workload
from tests.scenarios.test_offload_worlds import some_clients

BLOCK_BYTES = 4
FULL = KVCacheGroupSpec(block_size=4, bytes_per_token=1)


def simple(*, cpu_blocks: int = 64, num_gpu_blocks: int = 17, **options: Any) -> ReplayConfig:  # noqa: ANN401 - its fields
    config = SimpleCpuConfig(cpu_bytes_to_use=cpu_blocks * BLOCK_BYTES, copy_latency=1e-6, **options)
    connector = ConnectorConfig(kind="simple_cpu", options=config)
    return replace(single(role(num_gpu_blocks=num_gpu_blocks)), connector=connector)


def test_a_prompt_comes_back() -> None:
    """A token is left to compute: of four blocks three are loaded."""
    played = play(simple(), there_and_back())
    assert not played.violations
    assert [line for line in played.story("b") if "load" in line or "lookup" in line] == [
        "401 E0 b lookup tokens=12 blocks=0 status=async",
        "401 E0 b load.started tokens=12 blocks=3 status=CPU",
        "402 E0 b load.finished tokens=12",
    ]


@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_what_is_generated_is_stored_too(behaviour: str, tmp_path: Path) -> None:
    requests = workload(
        request("a", 0, prompt_tokens=16, output_tokens=9, text="abcd", session="s", turn=0),
        request("f", 300, prompt_tokens=60),
        request("b", 600, prompt_tokens=28, text="abcdefg", session="s", turn=1),
    )
    summary = judge(tmp_path, simple(), requests, behaviour=behaviour)
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    assert summary.tiers.hit_tokens["CPU"] == 24


def test_a_full_pool_evicts_what_was_used_least_recently(tmp_path: Path) -> None:
    summary = judge(tmp_path, simple(cpu_blocks=15), there_and_back())
    assert summary.verdict == "passed"
    assert summary.tiers is not None
    assert summary.tiers.evicted_chunks == {"CPU": {"capacity": 9}}  # 4 + 15 + 4 blocks in 14
    assert "CPU" not in summary.tiers.hit_tokens


def test_a_preemption_waits_for_all_copies() -> None:
    """16 bytes take 160 ms."""
    faults = ["scheduler.preempt:request=a"]
    slow = play(simple(copy_bytes_per_s=100), there_and_back(f_ms=900, b_ms=1500), *faults)
    quick = play(simple(), there_and_back(f_ms=900, b_ms=1500), *faults)
    assert not slow.violations
    ends = [played.ends()["a"][2] for played in (slow, quick)]
    assert ends[0] - ends[1] > 100


class TestTheCopyThread:
    def test_it_dies_and_nobody_is_told(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, simple(), there_and_back(), "simple-cpu.copy-raises:request=b,nth=1")
        assert summary.verdict == "stalled"
        assert [(stall.request_id, stall.waiting_on) for stall in summary.stalled] == [("b", "remote KV")]

    def test_under_ideal_only_its_job_fails(self, tmp_path: Path) -> None:
        fault = "simple-cpu.copy-raises:request=b,nth=1"
        summary = judge(tmp_path, simple(), there_and_back(), fault, behaviour="ideal", policy="recompute")
        assert summary.verdict == "passed"
        assert summary.requests.finished == 3
        assert summary.loads.failed_by_cause == {"the copy raised an exception": 1}

    def test_a_store_that_raises_is_forgotten_under_ideal(self, tmp_path: Path) -> None:
        fault = "simple-cpu.copy-raises:request=a"
        summary = judge(tmp_path, simple(), there_and_back(), fault, behaviour="ideal")
        assert summary.verdict == "passed"
        assert summary.tiers is not None
        assert summary.tiers.stored.failed > 0
        assert "CPU" not in summary.tiers.hit_tokens

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_a_slow_copy_only_delays(self, behaviour: str, tmp_path: Path) -> None:
        summary = judge(tmp_path, simple(), there_and_back(), "simple-cpu.copy-slow:request=b", behaviour=behaviour)
        assert summary.verdict == "passed"
        assert summary.tiers is not None
        assert summary.tiers.saved_tokens == 12


@pytest.mark.incident("H1")
class TestFoundAndGoneBeforeItIsLoaded:
    """vllm#39702: a second lookup instead of a pin."""

    def play(self, lookup: str) -> Play:
        behaviour = profile("vllm-0.33").with_switch(f"simple_cpu_lookup={lookup}")
        plan = make_plan(["simple-cpu.evict-between:request=b"])
        sink = ListSink(DETAIL_BLOCKS)
        settings = RunSettings(config=simple(), behaviour=behaviour, recompute=False, plan=plan)
        cluster = Cluster(settings, there_and_back(), sink)
        cluster.run()
        return Play(cluster, sink)

    def test_before_the_fix_the_engine_dies(self) -> None:
        played = self.play("again")
        assert [(event.status, event.cause) for event in played.of("engine.crashed")] == [
            ("AssertionError", "Expected 12 hit tokens, got 0")
        ]

    def test_pinned_it_stays(self) -> None:
        played = self.play("pin")
        assert not played.violations
        assert [event.num_tokens for event in played.of("load.started")] == [12]
        (node,) = played.cluster.nodes
        assert isinstance(node.offload, SimpleCpu)
        assert not (node.offload.scheduler.pool.ref_counts[1:] > 0).any()  # no pin is left


LAYOUTS = {
    "window": (FULL, KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8, bytes_per_token=1)),
    "states": (FULL, STATES),
    "both": (
        FULL,
        STATES,
        KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=5, bytes_per_token=1),
    ),
}


class TestSeveralGroups:
    """The CPU's pool is a second cache of the same groups: hits end where all of them can go on."""

    def config(self, layout: str, speculative: SpeculativeConfig | None = None) -> ReplayConfig:
        base = simple(num_gpu_blocks=80)
        cache = replace(base.roles["engine"].cache, prefix_cache_retention_interval=None)
        roles: dict[Role, RoleConfig] = {"engine": replace(base.roles["engine"], cache=cache)}
        groups = LAYOUTS[layout]
        return with_drafts(replace(base, model=replace(base.model, groups=groups), roles=roles), speculative)

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_a_prompt_comes_back(self, layout: str, behaviour: str) -> None:
        played = play(self.config(layout), there_and_back(), "cache.reset:at=300ms,what=gpu", behaviour=behaviour)
        assert not played.violations
        assert [event.num_tokens for event in played.of("load.finished", request_id="b")] == [12]

    def test_a_drafter_costs_a_block(self) -> None:
        """Of one group: where several could be the drafter's, all give one up."""
        speculative = SpeculativeConfig(num_speculative_tokens=1, method="mtp")
        plain = replace(self.config("window"), model=simple().model)
        for config, tokens in ((plain, 12), (with_drafts(plain, speculative), 8)):
            played = play(config, there_and_back(), "cache.reset:at=300ms,what=gpu")
            assert not played.violations
            assert [event.num_tokens for event in played.of("load.finished", request_id="b")] == [tokens]

    def test_a_block_is_stored_a_step_later_and_the_last_when_its_request_ends(self) -> None:
        """The prompt's four blocks in the second step, a fifth that the output fills at the end."""
        played = play(simple(), workload(request("a", prompt_tokens=16, output_tokens=5)))
        assert played.log("store.started", columns=("num_blocks", "step")) == [
            (11.0, "store.started", "E0", "a", 4, 1),
            (51.0, "store.started", "E0", "a", 1, 5),
        ]
        ((number, *_),) = [(event.step, event) for event in played.of("request.finished")]
        assert number == 4


class TestLazyStores:
    """Blocks are stored when nobody holds them, in the order in which they would be lost."""

    def test_nothing_is_stored_before_its_request_ends(self) -> None:
        """The prompt's four blocks and what the output fills, at once, in the step that tells of the end."""
        played = play(simple(lazy_offload=True), workload(request("a", prompt_tokens=16, output_tokens=5)))
        (ended,) = played.of("request.finished")
        assert played.log("store.started", columns=("num_blocks",)) == [
            (ended.time_ns / 1e6, "store.started", "E0", None, 5)
        ]

    def test_a_prompt_comes_back(self) -> None:
        played = play(simple(lazy_offload=True), there_and_back())
        assert not played.violations
        assert [event.num_tokens for event in played.of("load.finished", request_id="b")] == [12]

    def test_a_step_looks_no_further_than_it_could_need_blocks(self) -> None:
        """Twice the blocks of a batch, or a window, of each group."""
        states = KVCacheGroupSpec(kind=MAMBA, block_size=8, mamba_cache_mode="align", state_bytes=4)
        window = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=10)
        ring = KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=4)
        assert blocks_ahead([FULL], 30) == 2 * 8
        assert blocks_ahead([FULL, states, window, ring], 30) == 2 * (8 + 2 + 4)

    def test_circles_end(self) -> None:
        """What is free on the GPU never fits, and while one store is under way the next begins, which evicts what the
        last but one has stored: nobody needs it, and still vLLM's engine would never sleep."""
        config = simple(cpu_blocks=10, lazy_offload=True)
        engine = config.roles["engine"]
        scheduler = replace(engine.scheduler, max_num_batched_tokens=8)
        config = replace(config, roles={"engine": replace(engine, scheduler=scheduler)})
        played = play(config, there_and_back())
        assert not played.violations
        assert [end[0] for end in played.ends().values()] == ["finished"] * 3
        end_ns = played.ends()["b"][2] * 1e6
        stored = [event.num_blocks or 0 for event in played.of("store.started") if event.time_ns >= end_ns]
        assert 17 < sum(stored) <= 17 + 9

    def test_a_reset_starts_at_the_head_again(self) -> None:
        resets = [f"cache.reset:at=300ms,what={what}" for what in ("connector", "gpu")]
        played = play(simple(lazy_offload=True), there_and_back(), *resets)
        assert not played.violations
        assert not played.of("load.started")


class TestSeveralRanks:
    """Each has a share of every block, a copy thread and a pool of its own; the scheduler waits for all of them."""

    def config(self, tp: int = 2, pp: int = 1, **options: Any) -> ReplayConfig:  # noqa: ANN401 - SimpleCpuConfig's
        config = simple(**options)
        return replace(config, topology=replace(config.topology, tp=tp, pp=pp))

    @pytest.mark.parametrize("sizes", [(2, 1), (4, 1), (1, 2), (2, 2)])
    @pytest.mark.parametrize("is_lazy", [False, True])
    def test_a_prompt_comes_back(self, sizes: tuple[int, int], *, is_lazy: bool) -> None:
        played = play(self.config(*sizes, lazy_offload=is_lazy), there_and_back())
        assert not played.violations
        assert [event.num_tokens for event in played.of("load.finished", request_id="b")] == [12]

    def test_the_slowest_rank_decides(self) -> None:
        slow = "simple-cpu.copy-slow:request=b,rank=1,delay=500ms"
        ends = [play(self.config(), there_and_back(), *faults).ends()["b"][2] for faults in ((), (slow,))]
        assert 500 <= ends[1] - ends[0] < 520

    def test_one_whose_thread_dies_is_enough_to_stall(self, tmp_path: Path) -> None:
        fault = "simple-cpu.copy-raises:request=b,rank=1,nth=1"
        summary = judge(tmp_path, self.config(), there_and_back(), fault)
        assert [(stall.request_id, stall.waiting_on) for stall in summary.stalled] == [("b", "remote KV")]

    def test_under_ideal_its_failure_is_the_loads(self, tmp_path: Path) -> None:
        fault = "simple-cpu.copy-raises:request=b,rank=1,nth=1"
        summary = judge(tmp_path, self.config(), there_and_back(), fault, behaviour="ideal", policy="recompute")
        assert summary.verdict == "passed"
        assert summary.loads.failed_by_cause == {"the copy raised an exception": 1}

    def test_memory_is_shared_out(self) -> None:
        shared = SimpleCpuConfig(cpu_bytes_to_use=256)
        assert [shared.num_blocks(4, num_ranks) for num_ranks in (1, 2, 4)] == [64, 32, 16]
        with pytest.raises(ConfigError, match=r"cpu_bytes_to_use: 4 bytes of a rank hold no two blocks of 4, one of"):
            shared.num_blocks(4, 64)
        with pytest.raises(
            ConfigError, match=r"8,589,934,592 bytes are 2,147,483,648 blocks of this model, and at most"
        ):
            SimpleCpuConfig().num_blocks(4)
        assert SimpleCpuConfig(cpu_bytes_to_use=1, cpu_bytes_to_use_per_rank=40).num_blocks(4, 8) == 10


class TestDisk:
    """A file in the place of memory: slower, and with a thread for either direction."""

    def config(self, **options: Any) -> ReplayConfig:  # noqa: ANN401 - SimpleCpuConfig's
        return simple(kv_offload_backend="disk", disk_capacity_bytes=256, use_page_cache=True, **options)

    def test_a_prompt_comes_back_from_storage(self, tmp_path: Path) -> None:
        summary = judge(tmp_path, self.config(), there_and_back())
        assert summary.verdict == "passed"
        assert summary.tiers is not None
        assert (summary.tiers.medium, summary.tiers.cpu_chunks) == ("STORAGE", 63)
        assert summary.tiers.hit_tokens["STORAGE"] == 12

    def test_it_is_as_fast_as_the_disk(self) -> None:
        """12 bytes at 100 a second, and it is no matter how fast memory is."""
        slow, quick = (play(self.config(disk_bytes_per_s=speed), there_and_back(b_ms=1500)) for speed in (100, 10**9))
        assert slow.ends()["b"][2] - quick.ends()["b"][2] == pytest.approx(120, abs=1)

    def test_an_error_of_one_direction_leaves_the_other_alone(self) -> None:
        """Of memory one thread serves both."""
        clients = there_and_back()
        late = workload(*clients.arrivals, request("c", 700, prompt_tokens=8))
        fault = "simple-cpu.copy-raises:request=b,nth=1"
        for config, num_stored in ((self.config(), 1), (simple(), 0)):
            played = play(config, late, fault)
            assert played.ends()["b"][0] == "stalled"
            stored = [event.time_ns for event in played.of("store.finished")]
            assert sum(time_ns > 700_000_000 for time_ns in stored) == num_stored

    def test_a_preemption_waits_for_nothing(self) -> None:
        faults = ["scheduler.preempt:request=a"]
        slow, quick = (
            play(self.config(disk_bytes_per_s=speed), there_and_back(f_ms=900, b_ms=1500), *faults)
            for speed in (100, 10**9)
        )
        assert not slow.violations
        assert slow.ends()["a"] == quick.ends()["a"]

    def test_blocks_are_whole_pages_unless_the_page_cache_is_used(self) -> None:
        with pytest.raises(ConfigError, match=r"blocks of 4 bytes are not whole pages of 4,096, which a disk needs"):
            replace(
                simple(),
                connector=ConnectorConfig(kind="simple_cpu", options=SimpleCpuConfig(kv_offload_backend="disk")),
            )
        with pytest.raises(ConfigError, match="kv_offload_backend must be cpu or disk, got 'dsk'"):
            SimpleCpuConfig(kv_offload_backend="dsk")  # type: ignore[arg-type]


FAULTS = ("simple-cpu.copy-raises:p=0.3", "simple-cpu.copy-slow:p=0.3,delay=50ms", "simple-cpu.evict-between:p=0.4")


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("is_lazy", [False, True])
@pytest.mark.parametrize("layout", ["one", *LAYOUTS])
@pytest.mark.parametrize("seed", range(8))
def test_random_engines(layout: str, seed: int, *, is_lazy: bool, overlaps: bool) -> None:
    """Ideal breaks no law under any faults, nor does 0.33 without; steps that are skipped change nothing."""
    rng = Random(f"{layout}/{seed}")
    cpu_blocks, num_gpu_blocks = rng.choice([6, 17, 65]), rng.choice([18, 24] if layout == "one" else [70, 90])
    speed = rng.choice([400, 10**9])
    config = simple(cpu_blocks=cpu_blocks, num_gpu_blocks=num_gpu_blocks, copy_bytes_per_s=speed, lazy_offload=is_lazy)
    if seed % 2:
        config = replace(config, topology=replace(config.topology, tp=1 + seed % 4, pp=1 + seed // 4 % 2))
    if layout != "one":
        config = replace(config, model=replace(config.model, groups=LAYOUTS[layout]))
    if overlaps:
        engine = config.roles["engine"]
        cache = replace(engine.cache, num_gpu_blocks=num_gpu_blocks + 40)
        scheduler = replace(engine.scheduler, async_scheduling=True)
        config = replace(config, roles={"engine": replace(engine, scheduler=scheduler, cache=cache)})
    clients = some_clients(rng)
    faults = [*rng.sample(FAULTS, rng.randint(0, 3)), *(["scheduler.preempt:p=0.4"] if rng.random() < 0.4 else [])]
    plain = play(config, clients)
    assert not plain.of("violation", "engine.crashed", "request.stalled")
    recompute = rng.random() < 0.6
    quick, slow = both_ways(config, clients, *faults, behaviour="ideal", recompute=recompute, seed=seed)
    assert not quick.of("violation", "engine.crashed", "request.stalled")
    # In steps that are skipped nobody is asked: where a lookup then has another answer, that is not told.
    stories = [[line for line in played.story() if not (is_lazy and " lookup " in line)] for played in (quick, slow)]
    assert stories[0] == stories[1]


@pytest.mark.parametrize("seed", [225, 319, 425, 476])
def test_a_block_is_stored_as_what_it_is_now(seed: int) -> None:
    """Where stores lag behind, a table names blocks that its window has left: others' by then, with more words."""
    rng = Random(seed)
    config = simple(
        cpu_blocks=rng.choice([12, 16, 24, 40]),
        num_gpu_blocks=rng.choice([26, 28, 32, 40]),
        copy_bytes_per_s=rng.choice([400, 4000, 10**9]),
    )
    window = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8, bytes_per_token=2)
    config = replace(config, model=replace(config.model, groups=(replace(FULL, block_size=8), window)))
    requests = []
    for place in range(rng.randint(4, 14)):
        letter, num_tokens = rng.choice("AB"), rng.randint(1, 30)
        start_ms, output_tokens = rng.randint(0, 1200), rng.randint(5, 32)
        text = [*(f"{letter}{index}" for index in range(rng.randint(0, 8))), *(f"{place}.{at}" for at in range(20))]
        requests.append(
            request(f"r{place}", start_ms, prompt_tokens=num_tokens, output_tokens=output_tokens, text=text)
        )
    faults = ["scheduler.preempt:p=0.4"] if rng.random() < 0.5 else []
    played = play(config, workload(*requests), *faults)
    assert not played.of("violation")
    assert played.of("load.finished")


def test_config() -> None:
    config = simple()
    assert config_from_json(config.to_json()) == config
    states_only = KVCacheGroupSpec(kind=SLIDING_WINDOW, block_size=4, sliding_window=8, bytes_per_token=1)
    with pytest.raises(ConfigError, match="simple_cpu needs a group of full attention"):
        replace(config, model=replace(config.model, groups=(states_only,)))
    with pytest.raises(ConfigError, match="4 bytes hold no two blocks of 4, one of which is the null block"):
        simple(cpu_blocks=1)
    with pytest.raises(ConfigError, match=r"num_cpu_blocks must be in \[2, 64\], what cpu_bytes_to_use holds, got 65"):
        simple(num_cpu_blocks=65)
    engine = config.roles["engine"]
    with pytest.raises(ConfigError, match="enable_prefix_caching: simple_cpu needs it"):
        replace(config, roles={"engine": replace(engine, cache=replace(engine.cache, enable_prefix_caching=False))})
