"""Set-up faults: another configuration, or other parameters on arrival."""

from kvreplay.faults.plan import make_plan
from kvreplay.faults.setup import overrides
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
    specs = ["config.override", "config.override:instance=D*,key=scheduler.policy,value=priority", "timeout"]
    plan = make_plan(specs)
    assert overrides(plan) == [("cache.num_gpu_blocks", "1024", f"--inject {specs[0]}")]
    assert overrides(plan, "D0") == [("scheduler.policy", "priority", f"--inject {specs[1]}")]
    assert overrides(plan, "P0") == []


def test_a_changed_configuration_counts_as_fired() -> None:
    assert Bench("config.override").fired() == [1]
