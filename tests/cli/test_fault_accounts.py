"""What a run says of its faults: who came to harm by each, and whether it tested anything."""

import json
from typing import Any

import pytest

from kvreplay.cli.app import run_app


def played(arguments: str, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    run_app(["run", "multi-turn", "--json", *arguments.split()])
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize(
    "arguments",
    [
        "--config offload-hybrid --inject offload.done-lost",
        "--config offload-hybrid --inject offload.ack-lost",
        "--config offload-hybrid --set connector.kind=simple_cpu --inject simple-cpu.copy-raises",
        "--config mooncake-4p4d-tp4-tp2 --inject mooncake.bootstrap-partial-ranks",
    ],
)
def test_every_stall_behind_the_only_fault_is_counted_as_its_own(
    arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    document = played(arguments, capsys)
    [fault] = document["faults"]
    assert {stall["fault"] for stall in document["stalled"]} == {fault["spec"]}
    stalled = fault["outcomes"].get("stalled", 0) + fault["followed"].get("stalled", 0)
    assert stalled == document["requests"]["stalled"] > fault["outcomes"].get("stalled", 0)
    assert all(violation["fault"] == fault["spec"] for violation in document["violations"])


def test_who_is_refused_after_a_crash_of_all_follows_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    document = played("--inject peer-crash:at=5s,instance=*", capsys)
    [fault], requests = document["faults"], document["requests"]
    assert requests["rejected"] == fault["followed"]["rejected"] > 0
    assert (requests["rejected_unfaulted"], requests["failed_unfaulted"]) == (0, 0)
    assert sorted(fault["acted_on"]) == ["D0", "P0"]


@pytest.mark.parametrize(
    ("name", "instances"),
    [
        ("peer-crash:at=5s", ["P0"]),
        ("cache.reset:at=5s,instance=D*", ["D0"]),
        ("engine.restart:at=5s", ["P0"]),
        ("mooncake.engine-init", ["P0"]),
    ],
)
def test_an_action_says_where_it_acted(name: str, instances: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert played(f"--inject {name}", capsys)["faults"][0]["acted_on"] == instances


def test_a_configuration_that_fits_no_request_passes_but_not_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    document = played("--set model.max_model_len=10", capsys)
    assert document["verdict"] == "passed"
    assert document["requests"]["rejected_unfaulted"] == document["requests"]["total"] == 60
    assert document["reasons"] == [{"outcome": "rejected", "cause": "max_model_len of 10 exceeded", "count": 60}]
    assert run_app(["run", "multi-turn", "--set", "connector.abort_request_timeout=0"]) == 0
    assert "! 60 requests failed without a fault to blame: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["offload.evict-between", "offload.not-ready-hit", "cache.evict:at=0s"])
def test_a_fault_that_finds_nothing_to_act_on_never_fires(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = played(f"--config offload-hybrid --limit 4 --inject {name}", capsys)
    assert document["loads"]["started"] == 0
    assert document["faults"][0]["fired"] == 0


@pytest.mark.parametrize(
    ("name", "sends"),
    [
        ("bootstrap-failure", False),
        ("mooncake.mixed-bootstrap-addr", False),
        ("mooncake.bootstrap-stale-addr", True),
        ("mooncake.layout-miss", True),
        ("error-response", True),
    ],
)
def test_pulls_add_up(name: str, sends: bool, capsys: pytest.CaptureFixture[str]) -> None:
    loads = played(f"--limit 8 --inject {name}", capsys)["loads"]
    assert (loads["pulls_sent"], loads["pulls_settled"], loads["pulls_unsent"]) == ((8, 8, 0) if sends else (0, 0, 8))
    assert sum(loads["pulls_failed_by_cause"].values()) in (0, 8)


def test_failures_behind_a_harm_that_lasts_are_the_faults_own(capsys: pytest.CaptureFixture[str]) -> None:
    """One wrong answer of the bootstrap server is believed from then on."""
    document = played("--limit 8 --inject mooncake.bootstrap-stale-addr:nth=1", capsys)
    [fault], requests = document["faults"], document["requests"]
    assert (requests["failed"], requests["failed_unfaulted"]) == (8, 0)
    assert (fault["requests"], fault["followed"]) == (1, {"failed": 7})
    assert {violation["fault"] for violation in document["violations"]} == {fault["spec"]}


def test_whoever_hits_what_was_read_too_late_is_the_victim_of_that(capsys: pytest.CaptureFixture[str]) -> None:
    document = played("--config offload-hybrid --inject offload.late-read", capsys)
    assert {violation["checker"] for violation in document["violations"]} == {"CONTENT"}
    assert {violation["fault"] for violation in document["violations"]} == {"offload.late-read"}


TOGETHER = (
    "--config mooncake-1p1d --set connector.kind=multi --set connector.connectors=offloading,mooncake "
    "--set connector.cpu_bytes_to_use=4000000000 --set model.max_model_len=8192 --set cache.num_gpu_blocks=600 "
    "--policy recompute --limit 40"
)


def test_who_waits_for_blocks_of_the_stalled_stalls_behind_their_fault(capsys: pytest.CaptureFixture[str]) -> None:
    document = played(f"{TOGETHER} --inject timeout", capsys)
    assert {stall["fault"] for stall in document["stalled"]} == {"timeout"}
    [fault] = document["faults"]
    assert fault["outcomes"]["stalled"] + fault["followed"]["stalled"] == document["requests"]["stalled"]
    assert fault["followed"]["stalled"] > 0


def test_a_producer_that_cannot_be_told_to_let_go_fails_no_load_from_the_cpu(
    capsys: pytest.CaptureFixture[str],
) -> None:
    document = played(f"{TOGETHER} --profile ideal --inject mooncake.bootstrap-http-error", capsys)
    assert (document["verdict"], document["violations"]) == ("passed", [])
    assert document["requests"]["finished"] == 40
