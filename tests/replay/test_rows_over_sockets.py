"""Every row of the fault catalogue over sockets: it fires there, and comes to what it comes to in virtual time."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest

from kvreplay.cli.app import run_app
from kvreplay.faults.catalogue import catalogue
from tests.replay.row_runs import RUNS, WITHOUT_SOCKETS, Run
from tests.scenarios.stage import judge, play

ENDS = [f"request.{end}" for end in ("finished", "failed", "aborted", "rejected", "stalled")]
TIME_SCALE = 10_000
"""As fast as it can be."""


def test_every_row_has_a_run_or_a_reason_for_having_none() -> None:
    rows = [row for run in RUNS.values() for row in run.rows]
    assert len(rows) == len(set(rows))
    assert {row.needs for name, row in catalogue().items() if name not in rows} == set(WITHOUT_SOCKETS)
    assert {catalogue()[name].needs for name in rows} == {"", "mooncake"}


@pytest.mark.parametrize("kind", WITHOUT_SOCKETS)
def test_what_copies_inside_an_instance_is_refused(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    sets = ["--set", f"connector.kind={kind}", "--set", "connector.cpu_bytes_to_use=1000000000"]
    assert run_app(["run", "decode-stall", "--config", "single", *sets, "--transport", "zmq"]) == 2
    assert capsys.readouterr().err == f"error: --transport zmq: only mooncake has sockets, connector.kind is {kind}\n"


@pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
@pytest.mark.parametrize("run", RUNS.values(), ids=RUNS)
def test_every_row_fires(run: Run, behaviour: str) -> None:
    played = play(run.config, run.requests, *run.inject, behaviour=behaviour)
    assert {event.status for event in played.of("fault.injected")} == set(run.rows)
    if behaviour == "ideal":
        assert played.violations == []


def outcome(run: Run, folder: Path, behaviour: str, **transport: Any) -> dict[str, Any]:  # noqa: ANN401 - of RunOptions
    """What comes of a run, but for times."""
    output = folder / "played.parquet"
    summary = judge(folder, run.config, run.requests, *run.inject, behaviour=behaviour, output=output, **transport)
    ends = (
        pl.read_parquet(output)
        .filter(pl.col("kind").cast(pl.String).is_in(ENDS) & pl.col("instance").is_not_null())
        .select("request_id", "instance", "kind", "num_tokens", "cause", "output_hash")
        .with_columns(
            pl.when(pl.col("kind") == "request.stalled").then(None).otherwise("num_tokens").alias("num_tokens")
        )
    )
    return {
        "ends": sorted(ends.rows(), key=str),
        "crashes": [(crash.instance, crash.exception, crash.message) for crash in summary.crashes],
        "found": sorted({(found.checker, found.request_id, found.fault) for found in summary.violations}, key=str),
        "stalled": sorted((stall.request_id, stall.waiting_on, stall.fault) for stall in summary.stalled),
        "faults": summary.faults,
        "recomputed": summary.recomputed_tokens,
        "loaded": summary.loaded_tokens,
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_sockets_change_nothing(name: str, tmp_path: Path) -> None:
    virtual = outcome(RUNS[name], tmp_path, "vllm-0.33")
    assert outcome(RUNS[name], tmp_path, "vllm-0.33", transport="zmq", time_scale=TIME_SCALE) == virtual


@pytest.mark.slow
@pytest.mark.parametrize("name", ["queries", "pulls"])
def test_nor_do_they_where_everything_is_survived(name: str, tmp_path: Path) -> None:
    virtual = outcome(RUNS[name], tmp_path, "ideal")
    assert virtual["found"] == []
    assert outcome(RUNS[name], tmp_path, "ideal", transport="zmq", time_scale=TIME_SCALE) == virtual
