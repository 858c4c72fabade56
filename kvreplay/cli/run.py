"""`kvreplay run`."""

import sys
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated

import typer

from kvreplay.cli.common import (
    BehaviourOption,
    ConfigOption,
    JsonOption,
    LimitOption,
    PolicyOption,
    ProfileOption,
    SeedOption,
    SetOption,
    check_name,
    chosen,
    make_console,
    print_warning,
    trace_name,
)

MAX_TIME_SCALE = 10_000
MAX_OVERDUE_AFTER_S = 1_000_000_000

if TYPE_CHECKING:
    from kvreplay.replay.config import ReplayConfig
    from kvreplay.verdict.model import Summary


def _check_overdue_after(seconds: float) -> float:
    """Some versions of typer let a NaN, which lies nowhere, through a range."""
    from kvreplay.errors import ConfigError

    if not 0 <= seconds <= MAX_OVERDUE_AFTER_S:
        raise ConfigError(f"--overdue-after {seconds:g}: expected 0 to {MAX_OVERDUE_AFTER_S}")
    return seconds


def run(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Parquet trace, or the name of a canned one.")],
    *,
    config: ConfigOption = None,
    inject: Annotated[
        list[str] | None,
        typer.Option("--inject", metavar="FAULT", help="NAME[:key=value,...], as timeout:p=0.02. Repeatable."),
    ] = None,
    plan: Annotated[
        Path | None, typer.Option("--plan", metavar="FILE", help=r"TOML file with \[\[fault]] tables, before --inject.")
    ] = None,
    profile: ProfileOption = None,
    behaviour: BehaviourOption = None,
    policy: PolicyOption = None,
    settings: SetOption = None,
    seed: SeedOption = 0,
    limit: LimitOption = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write the trace of the replay there.")
    ] = None,
    detail: Annotated[
        str | None,
        typer.Option("--detail", metavar="run|steps|blocks", help="What the trace of -o holds. Default: run."),
    ] = None,
    baseline: Annotated[
        bool, typer.Option("--baseline", help="Also play the faultless twin, and show what the faults cost.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            "--fail-on",
            metavar="WORDS",
            help="What fails a run, in place of crashed,stalled,violated: these (or default), failed, rejected, "
            "aborted, overdue, unfired (faults); or none.",
        ),
    ] = None,
    overdue_after: Annotated[
        float,
        typer.Option(
            "--overdue-after",
            metavar="S",
            min=0,
            max=MAX_OVERDUE_AFTER_S,
            callback=_check_overdue_after,
            help="Parked so long past its timers: overdue.",
        ),
    ] = 10.0,
    transport: Annotated[
        str,
        typer.Option(
            "--transport", metavar="virtual|zmq", help="zmq: each instance a process, sockets between them, paced time."
        ),
    ] = "virtual",
    time_scale: Annotated[
        float | None,
        typer.Option(
            "--time-scale", metavar="X", help="With zmq: X virtual seconds in a real one at most; 10 by default."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Replay TRACE against a cluster in virtual time, with faults, and judge what became of it.

    Exits 0 if it passed, 3 on a violation, 4 if requests stalled, 5 if an engine crashed.
    The same trace, config, faults and seed give the same result, byte for byte.
    """
    from kvreplay.errors import ConfigError
    from kvreplay.events import DETAIL_LEVELS
    from kvreplay.faults.plan import make_plan
    from kvreplay.replay.config_load import load_config
    from kvreplay.replay.runner import (
        DEFAULT_TIME_SCALE,
        RunOptions,
        open_trace,
        run_trace,
        settle_imports,
        trace_config,
    )
    from kvreplay.report.progress import progress
    from kvreplay.trace.writer import check_output
    from kvreplay.verdict.model import DEFAULT_FAIL_ON
    from kvreplay.verdict.verdict import parse_fail_on

    started_s = perf_counter()
    faults = make_plan(inject or (), plan)
    path, opened = open_trace(trace_name(trace))
    if detail is not None:
        chosen("--detail", detail, DETAIL_LEVELS)
        if output is None:
            raise ConfigError(f"--detail {detail}: says what a written trace holds, give -o as well")
    if output is not None:
        check_name(output)
        check_output(output, [path, *([plan] if plan else []), *([Path(config)] if config else [])])
    loaded = load_config(
        config,
        sets=settings or (),
        policy=policy,
        profile=profile,
        switches=behaviour or (),
        trace_config=trace_config(opened),
        trace_name=str(path),
    )
    _check_transport(chosen("--transport", transport, ("virtual", "zmq")), time_scale, loaded.config)
    options = RunOptions(
        trace=path,
        loaded=loaded,
        plan=faults,
        seed=seed,
        limit=limit,
        detail=DETAIL_LEVELS[detail or "run"],
        output=output,
        baseline=baseline,
        fail_on=parse_fail_on(fail_on) if fail_on is not None else DEFAULT_FAIL_ON,
        overdue_after_s=overdue_after,
        sets=settings or (),
        behaviours=behaviour or (),
        injected=inject or (),
        plan_file=plan.name if plan is not None else None,
        transport="zmq" if transport == "zmq" else "virtual",
        time_scale=time_scale if time_scale is not None else DEFAULT_TIME_SCALE,
    )
    # Not `is_terminal`, which FORCE_COLOR makes true: a log may want colours, but never a bar.
    bar = partial(progress, console=make_console(stderr=True)) if sys.stderr.isatty() else None
    settle_imports(loaded.config)
    result = run_trace(options, opened, bar)
    for warning in result.warnings:
        print_warning(warning)
    if faults and loaded.config.kv.check == "off":
        print_warning("kv.check is off: contents are not compared, and wrong ones pass unseen")
    if baseline and not faults:
        print_warning("--baseline: there are no faults whose cost could be shown")
    show(result.summary.with_wall_seconds(perf_counter() - started_s), as_json=as_json)
    raise typer.Exit(result.summary.exit_status)


def _check_transport(transport: str, time_scale: float | None, config: "ReplayConfig") -> None:
    from kvreplay.errors import ConfigError

    if transport == "virtual" and time_scale is not None:
        raise ConfigError("--time-scale: virtual time has none; it goes with --transport zmq")
    if transport == "zmq" and config.connector.kind != "mooncake":
        raise ConfigError(f"--transport zmq: only mooncake has sockets, connector.kind is {config.connector.kind}")
    if time_scale is not None and not 0 < time_scale <= MAX_TIME_SCALE:
        raise ConfigError(f"--time-scale {time_scale:g}: must be > 0 and <= {MAX_TIME_SCALE}")


def show(summary: "Summary", *, as_json: bool) -> None:
    if as_json:
        from kvreplay.report.json_report import write_json

        write_json(summary, sys.stdout)
    else:
        from kvreplay.report.terminal import print_report

        print_report(summary, make_console())
