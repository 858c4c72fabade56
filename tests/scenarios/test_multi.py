"""One prefill and one decode instance with Mooncake and a CPU tier each, asked in either order."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kvreplay.connectors.multi.config import MultiConfig
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.errors import ConfigError
from kvreplay.faults.catalogue import catalogue
from kvreplay.ids import NS_PER_S
from kvreplay.kv.specs import CIRCULAR_BUFFER, MLA, SLIDING_WINDOW_MLA, KVCacheGroupSpec
from kvreplay.replay.config import ConnectorConfig, ReplayConfig
from kvreplay.replay.config_load import config_from_document, config_from_json
from kvreplay.sim.envelope import RANK_REPORT
from kvreplay.trace.workload import Workload
from tests.scenarios.offload_stage import SLOT
from tests.scenarios.stage import BLOCK, judge, pair, play, request, role, workload

Order = Literal["mooncake,offloading", "offloading,mooncake"]


def both(order: Order) -> ReplayConfig:
    """Pools that hold one longest request."""
    small = role(num_gpu_blocks=17)
    base = pair(prefill=small, decode=small)
    tier = OffloadingConfig(cpu_bytes_to_use=64 * SLOT, copy_latency=1e-6)
    options = MultiConfig(connectors=order, mooncake=base.connector.mooncake, offloading=tier)
    return replace(base, connector=ConnectorConfig(kind="multi", options=options))


def again() -> Workload:
    """`b` has the prompt of `a`, which `f` has driven off both GPUs."""
    return workload(
        request("a", 0, prompt_tokens=16, text="abcd"),
        request("f", 200, prompt_tokens=60),
        request("b", 500, prompt_tokens=20, text="abcde"),
    )


@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_with_mooncake_first_only_the_producer_loads_from_its_tier(behaviour: str) -> None:
    played = play(both("mooncake,offloading"), again(), behaviour=behaviour)
    assert not played.violations
    loads = [(event.instance, event.num_tokens, event.status) for event in played.of("load.started", request_id="b")]
    assert sorted(loads) == [("D0", 20, None), ("P0", 12, "CPU")]  # a block is still on P


@pytest.mark.parametrize("order", ["mooncake,offloading", "offloading,mooncake"])
def test_nobody_asks_every_ms_whether_who_does_not_fit_could_load_more_by_now(order: Order) -> None:
    """The producer keeps the blocks of `a`, which is never pulled, for 480 s: steps of a real engine change nothing."""
    config = both(order)
    options = config.connector.options
    assert isinstance(options, MultiConfig)
    tier = replace(options.offloading, spec_name="TieringOffloadingSpec")
    config = replace(config, connector=replace(config.connector, options=replace(options, offloading=tier)))
    requests = workload(request("a", prompt_tokens=60), request("b", 200, prompt_tokens=60))
    played = play(config, requests, "bootstrap-failure:request=a")
    sent = {event.request_id: event for event in played.of("request.finished", instance="P0")}
    assert sent["b"].time_ns > 480 * NS_PER_S
    assert sent["b"].step is not None
    assert sent["b"].step < 100


@pytest.mark.parametrize("order", ["mooncake,offloading", "offloading,mooncake"])
def test_nobody_asks_every_ms_for_a_lookup_that_a_fault_keeps_back(order: Order) -> None:
    """Another's store comes in between, after which it is asked once more; then nothing happens for 480 s."""
    requests = workload(
        request("a", prompt_tokens=60), request("b", 200, prompt_tokens=60), request("c", 300, prompt_tokens=4)
    )
    faults = ("bootstrap-failure:request=a", "offload.lookup-pending-forever:request=b")
    played = play(both(order), requests, *faults)
    (stall,) = played.of("request.stalled", instance="P0")
    assert (stall.request_id, stall.cause) == ("b", "an undecided lookup")
    assert played.of("store.finished", instance="P0", request_id="c")
    assert played.cluster.loop.num_run < 5_000


@pytest.mark.incident("M3")
@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_with_the_tier_first_the_producer_is_told_to_let_go(behaviour: str) -> None:
    """M3, vllm#20609: P's blocks come back by a pull of none, not by a timeout; what is missing is computed."""
    config = both("offloading,mooncake")
    played = play(config, again(), behaviour=behaviour)
    assert not played.violations
    loads = [(event.instance, event.num_tokens, event.status) for event in played.of("load.started", request_id="b")]
    assert sorted(loads) == [("D0", 16, "CPU"), ("P0", 12, "CPU")]
    assert [event.num_blocks for event in played.of("pull.sent", request_id="b")] == [0]
    assert not played.of("send.expired")
    assert played.num_free("P0") == 16
    assert all(end == "finished" for end, _, _ in played.ends().values())


@pytest.mark.parametrize("behaviour", ["post-50984", "vllm-0.33"])
def test_a_load_ends_once_though_mooncake_reports_the_pull_of_nothing(behaviour: str, tmp_path: Path) -> None:
    """Before its guard it said that the request's KV was there, while the tier's copy was still under way, and before
    the engine, which runs one request at a time, could take that at its word."""
    base = both("offloading,mooncake")
    options = base.connector.options
    assert isinstance(options, MultiConfig)
    tier = replace(options.offloading, load_bytes_per_s=400)
    connector = replace(base.connector, options=replace(options, offloading=tier))
    prefill, decode = role(num_gpu_blocks=40), role(num_gpu_blocks=40, max_num_seqs=1)
    config = replace(base, connector=connector, roles={"prefill": prefill, "decode": decode})
    requests = workload(
        request("a", 0, prompt_tokens=16, text="abcd"),
        request("x", 300, prompt_tokens=8, output_tokens=50),
        request("b", 460, prompt_tokens=60, text="abcdefghijklmno"),
    )
    fault = "cache.reset:at=450ms,instance=D0,what=running"
    played = play(config, requests, fault, behaviour=behaviour)
    assert len(played.of("pull.settled", request_id="b")) == 1
    assert len(played.of("load.finished", instance="D0", request_id="b")) == 1
    summary = judge(tmp_path, config, requests, fault, behaviour=behaviour)
    assert summary.tiers is not None
    assert summary.tiers.loaded.finished == summary.tiers.loaded.started
    assert summary.loaded_tokens == sum(event.num_tokens or 0 for event in played.of("load.finished"))


@pytest.mark.parametrize("order", ["mooncake,offloading", "offloading,mooncake"])
@pytest.mark.parametrize("fault", ["timeout:request=b", "offload.load-corrupt:request=b", "offload.ack-lost:request=b"])
def test_ideal_survives_faults_of_either(order: Order, fault: str, tmp_path: Path) -> None:
    summary = judge(tmp_path, both(order), again(), fault, behaviour="ideal", policy="recompute")
    assert summary.verdict == "passed"
    assert summary.requests.finished == 3


@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
@pytest.mark.parametrize(("order", "load"), [("mooncake,offloading", (21, None)), ("offloading,mooncake", (16, "CPU"))])
def test_who_loads_decides_what_a_load_brings(order: Order, load: tuple[int, str | None], behaviour: str) -> None:
    """A producer sends its window that no cache holds, and its ring: all that it offers is taken. A tier holds neither,
    and its hit ends where a block does."""
    groups = (
        KVCacheGroupSpec(kind=MLA, block_size=BLOCK, bytes_per_token=8),
        KVCacheGroupSpec(
            kind=SLIDING_WINDOW_MLA, block_size=BLOCK, sliding_window=8, bounded_replay=True, bytes_per_token=8
        ),
        KVCacheGroupSpec(kind=CIRCULAR_BUFFER, block_size=8, bytes_per_token=4),
    )
    config = both(order)
    roomy = role(num_gpu_blocks=40)
    config = replace(config, model=replace(config.model, groups=groups), roles=dict.fromkeys(config.roles, roomy))
    clients = workload(
        request("a", 0, prompt_tokens=16, text="abcd"),
        *(request(f"f{place}", 200 + 10 * place, prompt_tokens=60) for place in range(3)),
        request("b", 800, prompt_tokens=22, text="abcdef"),
    )
    played = play(config, clients, behaviour=behaviour)
    assert played.violations == []
    assert {end for end, _, _ in played.ends().values()} == {"finished"}
    loads = [(event.num_tokens, event.status) for event in played.of("load.started", instance="D0")]
    assert loads == [(15, None), *[(59, None)] * 3, load]


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
def test_an_engine_with_one_rank_beside_one_with_two(sizes: tuple[int, int], behaviour: str) -> None:
    """What the other side splits among its ranks the one rank's tier holds as well."""
    config = both("mooncake,offloading")
    config = replace(config, topology=replace(config.topology, prefill_tp=sizes[0], decode_tp=sizes[1]))
    played = play(config, again(), behaviour=behaviour)
    assert not played.violations
    assert {end for end, _, _ in played.ends().values()} == {"finished"}
    assert [event.num_tokens for event in played.of("load.started", instance="P0", request_id="b")] == [12]


def test_config_of_both() -> None:
    config = both("offloading,mooncake")
    assert config_from_json(config.to_json()) == config
    assert config.connector.parts == ["offloading", "mooncake"]


def test_it_needs_producers_and_consumers() -> None:
    document = {
        "model": {"preset": "llama-70b"},
        "topology": {"instances": 1},
        "connector": {"kind": "multi", "cpu_bytes_to_use": 1 << 40},
        "cache": {"num_gpu_blocks": 65536},
        "timing": {"preset": "llama-70b-8xh100"},
    }
    with pytest.raises(ConfigError, match=r"multi needs topology\.prefill and topology\.decode"):
        config_from_document(document, "x.toml")


@pytest.mark.parametrize("name", [name for name, row in catalogue().items() if row.target == RANK_REPORT])
def test_what_a_rank_reports_is_told_to_be_of_one_connector(name: str) -> None:
    """Each engine has one rank, of which Mooncake has nothing to be told: only reports of copies are on their way."""
    played = play(both("mooncake,offloading"), again(), f"{name}:nth=1", recompute=True)
    assert bool(played.of("fault.injected")) == name.startswith("offload.")
