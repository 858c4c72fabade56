"""One prefill and one decode instance with Mooncake and a CPU tier each, asked in either order."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from kvreplay.connectors.multi.config import MultiConfig
from kvreplay.connectors.offloading.config import OffloadingConfig
from kvreplay.errors import ConfigError
from kvreplay.replay.config import ConnectorConfig, ReplayConfig
from kvreplay.replay.config_load import config_from_document, config_from_json
from kvreplay.trace.workload import Workload
from tests.scenarios.offload_stage import SLOT
from tests.scenarios.stage import judge, pair, play, request, role, workload

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


@pytest.mark.parametrize("order", ["mooncake,offloading", "offloading,mooncake"])
@pytest.mark.parametrize("fault", ["timeout:request=b", "offload.load-corrupt:request=b", "offload.ack-lost:request=b"])
def test_ideal_survives_faults_of_either(order: Order, fault: str, tmp_path: Path) -> None:
    summary = judge(tmp_path, both(order), again(), fault, behaviour="ideal", policy="recompute")
    assert summary.verdict == "passed"
    assert summary.requests.finished == 3


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
