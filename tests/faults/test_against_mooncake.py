"""Each fault of the Mooncake catalogue against the connector's own state machines, generation settle (0.33.0)."""

import pytest

from kvreplay.faults.injector import Injector
from kvreplay.faults.plan import make_plan
from kvreplay.faults.topology import TopologyInfo
from tests.connectors.mooncake.pair import Pair, behaviour, request_for

TOPOLOGY = TopologyInfo(instances={"P0": "kv_producer", "D0": "kv_consumer"}, connectors=frozenset({"mooncake"}))
OMITTED = "peer finished without reporting a transfer result"
SILENCE = "transfer failed: Resource temporarily unavailable"
NOT_FOUND = "remote engine_id P0#0 not found from bootstrap server http://P0:8998"


def played(*specs: str, num_requests: int = 1, generation: str = "settle") -> tuple[Pair, Injector]:
    """So many finished requests, wanted by the consumer in one step."""
    pair = Pair(behaviour(mooncake_failure=generation))
    injector = Injector(make_plan(specs), 0, pair.sink, pair.loop, pair.bus)
    injector.arm(TOPOLOGY)
    numbers = range(1, num_requests + 1)
    for number in numbers:
        pair.finish([10 * number + 1, 10 * number + 2], p_req_id=f"p{number}", transfer_id=f"X{number}")
    pair.pull(*(request_for(f"d{number}", blocks=[[10 * number + 5, 10 * number + 6]]) for number in numbers))
    pair.run()
    return pair, injector


def outcome(pair: Pair) -> list[tuple[str | None, str | None]]:
    """Per settled request: its id, and why it failed."""
    return [(request_id, cause) for request_id, _, cause in pair.settled()]


@pytest.mark.parametrize(
    ("spec", "reason", "seconds"),
    [
        ("timeout", SILENCE, 540.0),
        ("error-response:message=no", "no", 0.0),
        ("partial-error:message=short", "short", 0.0),
        ("bootstrap-failure", NOT_FOUND, 0.2),
        ("bootstrap-failure:how=404", NOT_FOUND, 0.0),
        ("bootstrap-failure:how=garbage", NOT_FOUND, 0.0),
        ("bootstrap-failure:how=missing-engine", NOT_FOUND, 0.0),
        ("bootstrap-failure:how=hang", NOT_FOUND, 90.2),
        ("slow", None, 10.0),
        ("corrupt", None, 0.0),
        ("mooncake.bootstrap-refused:times=2", None, 0.2),
        ("mooncake.bootstrap-hang:times=1", None, 30.1),
        ("mooncake.bootstrap-slow", None, 10.0),
        ("mooncake.bootstrap-http-error", NOT_FOUND, 0.0),
        ("mooncake.bootstrap-bad-json", NOT_FOUND, 0.0),
        ("mooncake.bootstrap-engine-missing", NOT_FOUND, 0.0),
        ("mooncake.conn-refused", SILENCE, 540.0),
        ("mooncake.resp-lost", SILENCE, 540.0),
        ("mooncake.resp-delayed", SILENCE, 540.0),
        ("mooncake.resp-delayed:delay=500s", None, 500.0),
        ("mooncake.resp-duplicate", None, 0.0),
        ("mooncake.resp-omit", OMITTED, 0.0),
        ("mooncake.resp-unknown-id", None, 0.0),
        ("mooncake.resp-error:message=no", "no", 0.0),
        ("mooncake.resp-garbage", "transfer failed: ", 0.0),
        ("mooncake.resp-partial-err", "P num blocks less than D", 0.0),
        ("mooncake.engine-ret", "Mooncake transfer engine returned -1", 0.0),
        ("mooncake.engine-slow", "Mooncake transfer engine returned -1", 30.0),
        ("mooncake.engine-hang", "Mooncake transfer engine returned -1", 30.0),
        ("mooncake.engine-corrupt", None, 0.0),
        ("mooncake.engine-partial", None, 0.0),
    ],
)
def test_what_becomes_of_a_pull(spec: str, reason: str | None, seconds: float) -> None:
    pair, injector = played(spec)
    ((request_id, cause),) = outcome(pair)
    assert request_id == "d1"
    assert (cause or "").startswith(reason or "")
    assert (cause is None) == (reason is None)
    ((reported, finished, _, invalid),) = pair.reports_of("D0")
    assert reported == pytest.approx(seconds, abs=0.05)
    assert finished == ["d1"]
    assert invalid == ([] if reason is None else [15, 16])
    (statistics,) = injector.statistics()
    assert (statistics.fired, statistics.requests) == (1, ["d1"])


@pytest.mark.parametrize(
    "spec",
    [
        "timeout",
        "error-response",
        "bootstrap-failure",
        "mooncake.resp-garbage",
        "mooncake.resp-error",
        "mooncake.engine-ret",
    ],
)
def test_a_fault_of_the_whole_pull_names_exactly_the_requests_that_fail(spec: str) -> None:
    pair, injector = played(spec, num_requests=3)
    failed = sorted(request_id or "" for request_id, cause in outcome(pair) if cause is not None)
    assert failed == injector.statistics()[0].requests == ["d1", "d2", "d3"]


def test_a_batch_that_waits_for_anothers_bootstrap_answer_is_named_too() -> None:
    pair = Pair()
    injector = Injector(make_plan(["bootstrap-failure:how=hang"]), 0, pair.sink, pair.loop, pair.bus)
    injector.arm(TOPOLOGY)
    pair.pull(request_for("d1"))
    pair.run(10.0)
    pair.pull(request_for("d2"))
    pair.run()
    for event in pair.events("pull.settled"):
        injector.observe(event)
    assert [request_id for request_id, _ in outcome(pair)] == ["d1", "d2"]
    assert injector.statistics()[0] == ("bootstrap-failure:how=hang", 1, ["d1", "d2"])
    assert [event.transfer_id for event in pair.events("fault.injected")] == ["X1", "X2"]


@pytest.mark.parametrize("spec", ["partial-error", "mooncake.resp-omit", "partial-error:request=d2"])
def test_a_fault_of_one_request_names_exactly_that_one(spec: str) -> None:
    pair, injector = played(spec, num_requests=4)
    failed = [request_id for request_id, cause in outcome(pair) if cause is not None]
    assert len(failed) == 1
    assert failed == injector.statistics()[0].requests


@pytest.mark.parametrize("spec", ["partial-error", "timeout", "error-response"])
def test_before_50984_a_faulted_request_is_never_reported(spec: str) -> None:
    pair, injector = played(spec, num_requests=2, generation="silent")
    reported = {request for _, finished, _, _ in pair.reports_of("D0") for request in finished}
    assert reported == {"d1", "d2"} - set(injector.statistics()[0].requests)


def test_a_corrupted_block_is_known_to_the_memory_and_the_source_keeps_the_truth() -> None:
    pair, injector = played("corrupt", num_requests=2)
    ((block_id, provenance),) = pair.d_memory.corrupted.items()
    assert [provenance.request_id] == injector.statistics()[0].requests
    event = pair.sink.events[provenance.fault_handle]
    assert (event.kind, event.request_id, event.cause) == (
        "fault.injected",
        provenance.request_id,
        provenance.fault_spec,
    )
    assert pair.p_memory.blocks == {}
    assert pair.d_memory.block(block_id) != pair.p_memory.block(block_id - 4)


def test_what_engine_partial_leaves_out_keeps_its_old_bytes() -> None:
    pair, _ = played("mooncake.engine-partial")
    assert pair.d_memory.block(15) == pair.p_memory.block(11)
    assert pair.d_memory.block(16) == [0, 0, 0, 0]


def test_a_write_can_be_held_until_the_consumer_has_given_up() -> None:
    pair, injector = played("slow:until=pull.settled#self")
    assert outcome(pair)[0][1] == "Mooncake transfer engine returned -1"
    assert injector.num_held == 1
    injector.observe(pair.events("pull.settled")[0])
    pair.run()
    assert [provenance.request_id for provenance in pair.d_memory.in_doubt] == ["d1"]
