"""A fault that can never happen in a configuration is a usage error."""

from dataclasses import replace

import pytest

from kvreplay.errors import ConfigError
from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.plan import make_plan
from kvreplay.faults.topology import TopologyInfo, check_possible
from tests.faults.bench import TOPOLOGY

SINGLE = TopologyInfo(instances={"E0": ""}, request_ids=["r1", "r2"])
EVERYTHING = replace(
    TOPOLOGY,
    connectors=frozenset({row.needs for row in catalogue().values() if row.needs}),
    commands=frozenset(row.verb for row in catalogue().values()),
)


@pytest.mark.parametrize("name", list(catalogue()))
def test_every_fault_is_possible_somewhere(name: str) -> None:
    check_possible(make_plan([name]), EVERYTHING)


@pytest.mark.parametrize(
    "spec",
    ["timeout:instance=D*,peer=P1", "abort:instance=P0", "peer-crash:instance=D1", "timeout:request=r*,rank=0"],
)
def test_keys_that_match_something_pass(spec: str) -> None:
    check_possible(make_plan([spec]), replace(TOPOLOGY, request_ids=["r1"]))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("timeout", "timeout needs the mooncake connector; configured: none"),
        (
            "abort",
            "waits for pull.sent@serving, which needs mooncake; configured: none; its key when= says what it waits for",
        ),
        (
            "peer-crash:at=load.started",
            "waits for load.started, which needs mooncake or offloading or simple_cpu; configured: none",
        ),
        ("abort:when=running,request=x*", "request=x* matches none of 2 requests"),
        ("abort:when=queued,instance=E1", "instance=E1 matches no instance, expected E0"),
        ("peer-crash:at=request.routed@P0", "request.routed@P0 matches no instance, expected E0"),
        ("cache.reset", "nothing in this configuration can carry out reset"),
    ],
)
def test_one_engine_without_a_connector(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_possible(make_plan([spec]), SINGLE)
    assert str(error.value) == f"--inject {spec}: {reason}"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("timeout:instance=P0", "instance=P0 matches no instance, expected one of D0, D1"),
        ("timeout:peer=D*", "peer=D* matches no instance, expected one of P0, P1"),
        ("timeout:rank=1", "rank must be below 1, got 1"),
        ("corrupt:group=3", "group must be below 1, got 3"),
        ("timeout:after=request.routed@P0", "request.routed@P0 happens nowhere, expected one of D0, D1"),
        ("timeout:until=pull.s*@P*", "pull.s*@P* happens nowhere, expected one of D0, D1"),
        ("peer-crash:at=send.started@D0", "send.started@D0 happens nowhere, expected one of P0, P1"),
        ("timeout:after=5s,until=3s", "after=5s,until=3s leaves no time to act in"),
        ("timeout:after=3s,until=3s", "after=3s,until=3s leaves no time to act in"),
        ("peer-crash:after=2m", "at=1m comes before after=2m"),
        ("peer-crash:until=30s", "at=1m is not before until=30s"),
        ("timeout:after=pull.sent@X*", "pull.sent@X* matches no instance, expected one of P0, P1, D0, D1"),
    ],
)
def test_a_pair(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_possible(make_plan([spec]), TOPOLOGY)
    assert str(error.value) == f"--inject {spec}: {reason}"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("peer-crash:at=pull.sent@E0", "waits for pull.sent@E0, which needs mooncake; configured: offloading"),
        ("peer-crash:at=send.*", "waits for send.*, which needs mooncake; configured: offloading"),
        ("abort:when=queued,until=request.routed#x*", "request.routed#x* matches none of 2 requests"),
        ("abort:when=queued,after=step", "no fault can wait for step"),
        ("abort:when=queued,after=block.*@E0", None),
        ("abort:when=queued,after=run.summary", "no fault can wait for run.summary"),
        ("peer-crash:at=store.started@E0", None),
        ("peer-crash:at=*.started", None),
    ],
)
def test_events_that_never_come(spec: str, reason: str | None) -> None:
    """`block.*` has `block.evicted`, which every trace has; the others are only there with --detail blocks."""
    topology = replace(SINGLE, connectors=frozenset({"offloading"}))
    if reason is None:
        check_possible(make_plan([spec]), topology)
        return
    with pytest.raises(ConfigError) as error:
        check_possible(make_plan([spec]), topology)
    assert str(error.value) == f"--inject {spec}: {reason}"


def test_aborts_without_a_pull_are_possible_on_one_engine() -> None:
    check_possible(make_plan(["abort:when=queued", "abort:when=running", "peer-crash"]), SINGLE)


def test_a_pair_without_a_consumer_pulls_nothing() -> None:
    topology = replace(TOPOLOGY, instances={"P0": "kv_producer"})
    with pytest.raises(ConfigError, match=r"^--inject timeout: no instance is a kv_consumer or kv_both$"):
        check_possible(make_plan(["timeout"]), topology)
