"""`kvreplay synth`."""

from pathlib import Path
from typing import Annotated

import typer

from kvreplay.cli.common import JsonOption, SeedOption, SetOption, check_name, chosen, trace_name
from kvreplay.cli.import_ import print_written
from kvreplay.trace import synth_defaults as default

_LOAD = "Load"
_LENGTHS = "Lengths: N, fixed:N, lognormal:median=N,sigma=X[,max=N] or trace:TRACE"
_SHARING = "What prompts share"
_CLIENTS = "Clients"


def synth(
    *,
    output_file: Annotated[Path, typer.Option("-o", metavar="OUT", help="Trace to write.")],
    requests: Annotated[
        int, typer.Option(metavar="N", help="Requests in all, later turns included.", rich_help_panel=_LOAD)
    ] = default.REQUESTS,
    arrivals: Annotated[
        str,
        typer.Option(
            metavar="constant|poisson|bursty",
            help="Gaps between sessions: equal, exponential, or gamma.",
            rich_help_panel=_LOAD,
        ),
    ] = default.ARRIVALS,
    rate: Annotated[
        float, typer.Option(metavar="PER_S", help="New sessions per second.", rich_help_panel=_LOAD)
    ] = default.RATE,
    burstiness: Annotated[
        float,
        typer.Option(
            metavar="SHAPE",
            help="For bursty: the gamma distribution's shape. 1 is poisson; the less, the burstier.",
            rich_help_panel=_LOAD,
        ),
    ] = default.BURSTINESS,
    seed: SeedOption = 0,
    prompt: Annotated[
        str, typer.Option(metavar="LENGTHS", help="New text of each turn, in tokens.", rich_help_panel=_LENGTHS)
    ] = default.PROMPT,
    output: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS",
            help="Output of each request, in tokens. From the same trace as --prompt: drawn together.",
            rich_help_panel=_LENGTHS,
        ),
    ] = default.OUTPUT,
    max_tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="Prompt and output of one request: longer ones are cut, a session that would outgrow it ends.",
            rich_help_panel=_LENGTHS,
        ),
    ] = default.MAX_TOKENS,
    system_prompts: Annotated[
        int, typer.Option(metavar="N", help="Each session starts with one of N texts.", rich_help_panel=_SHARING)
    ] = default.SYSTEM_PROMPTS,
    system_tokens: Annotated[
        int, typer.Option(metavar="N", help="Length of these texts, in tokens.", rich_help_panel=_SHARING)
    ] = default.SYSTEM_TOKENS,
    turns: Annotated[
        str,
        typer.Option(
            metavar="LENGTHS",
            help="Turns of a session. Each contains all before it, and hits their outputs.",
            rich_help_panel=_SHARING,
        ),
    ] = default.TURNS,
    hash_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Tokens per prefix hash: sharing below that is lost.", rich_help_panel=_SHARING),
    ] = default.HASH_TOKENS,
    think: Annotated[
        float,
        typer.Option(
            metavar="S", help="Mean time from one turn's arrival to the next one's.", rich_help_panel=_CLIENTS
        ),
    ] = default.THINK_S,
    abort: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of requests given up.", rich_help_panel=_CLIENTS)
    ] = default.ABORT,
    abort_after: Annotated[
        float, typer.Option(metavar="S", help="Mean time until they are.", rich_help_panel=_CLIENTS)
    ] = default.ABORT_AFTER_S,
    config: Annotated[
        str | None,
        typer.Option(
            "--config",
            metavar="NAME|FILE",
            help="Preset or TOML file to store in the trace: what run takes without a --config of its own.",
        ),
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a workload. The same options and seed give the same file.

    Example: kvreplay synth -o chat.parquet --requests 500 --rate 2 --turns 4 --system-prompts 3 --system-tokens 1024
    """
    from kvreplay.errors import ConfigError
    from kvreplay.replay.config_load import load_config
    from kvreplay.replay.presets import find_trace
    from kvreplay.trace.lengths import parse_lengths
    from kvreplay.trace.synth import ArrivalProcess, SynthOptions, synthesise
    from kvreplay.trace.writer import check_output

    def find_named(name: str) -> Path:
        return find_trace(trace_name(name))

    options = SynthOptions(
        requests=requests,
        seed=seed,
        arrivals=ArrivalProcess(chosen("--arrivals", arrivals, list(ArrivalProcess))),
        rate=rate,
        burstiness=burstiness,
        prompt=parse_lengths("--prompt", prompt, find_named),
        output=parse_lengths("--output", output, find_named),
        system_prompts=system_prompts,
        system_tokens=system_tokens,
        turns=parse_lengths("--turns", turns, find_named),
        think_s=think,
        max_tokens=max_tokens,
        abort=abort,
        abort_after_s=abort_after,
        hash_tokens=hash_tokens,
    )
    if settings and config is None:
        raise ConfigError(f"--set {settings[0]}: changes a configuration, give --config as well")
    stored = load_config(config, sets=settings or ()).config.to_document() if config is not None else None
    check_name(output_file)
    check_output(output_file, [*options.input_files, *([Path(config)] if config is not None else [])])
    print_written(output_file, synthesise(options), options.metadata(stored), as_json=as_json)
