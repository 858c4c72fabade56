"""Set-up faults: another configuration, or other parameters on arrival."""

from kvreplay.faults.plan import make_plan
from kvreplay.faults.setup import rewrite_config
from tests.faults.bench import Bench

PARAMS = {"transfer_id": "xfer-a", "remote_engine_id": "P0#0", "do_remote_prefill": True}


def test_a_request_arrives_without_a_parameter() -> None:
    bench = Bench("mooncake.missing-params:request=a")
    arrived = bench.injector.rewrite_params(PARAMS, "a", "D0")
    assert arrived == {"transfer_id": "xfer-a", "do_remote_prefill": True}
    assert bench.injector.rewrite_params(PARAMS, "b", "D0") is PARAMS
    assert bench.faulted == ["a"]


def test_parameters_that_lack_it_anyway_are_no_match() -> None:
    bench = Bench("mooncake.missing-params:nth=1")
    producers = {"transfer_id": "xfer-a", "do_remote_decode": True}
    assert bench.injector.rewrite_params(producers, "a", "P0") is producers
    bench.injector.rewrite_params(PARAMS, "a", "D0")
    bench.injector.rewrite_params(PARAMS, "b", "D0")
    assert bench.faulted == ["a"]


def test_a_configuration_is_changed_for_all_or_for_one() -> None:
    config = {"cache": {"num_gpu_blocks": 100, "block_size": 16}, "scheduler": {"max_num_seqs": 8}}
    plan = make_plan(["config.override", "config.override:instance=D0,key=scheduler.policy,value=priority", "timeout"])
    changed = rewrite_config(plan, config)
    assert changed["cache"] == {"num_gpu_blocks": 1024, "block_size": 16}
    assert rewrite_config(plan, changed, "D0")["scheduler"] == {"max_num_seqs": 8, "policy": "priority"}
    assert rewrite_config(plan, changed, "D1") == changed
    assert config["cache"]["num_gpu_blocks"] == 100


def test_a_changed_configuration_counts_as_fired() -> None:
    assert Bench("config.override").fired() == [1]
