"""`kvreplay info`."""

from typing import Annotated

import typer

from kvreplay.cli.common import JsonOption, make_console, print_json, trace_name


def info(
    trace: Annotated[str, typer.Argument(metavar="TRACE", help="Parquet trace, or the name of a canned one.")],
    *,
    as_json: JsonOption = False,
) -> None:
    """Say what is in TRACE: where it comes from, its requests and what they share, instances, events."""
    from kvreplay.errors import ConfigError
    from kvreplay.replay.config_load import load_config
    from kvreplay.replay.runner import open_trace, trace_config
    from kvreplay.report.description import print_description
    from kvreplay.trace.describe import describe

    _, opened = open_trace(trace_name(trace))
    document = describe(opened)
    try:
        load_config(trace_config=trace_config(opened))
    except ConfigError as error:
        document["notes"].append(f"needs --config to be replayed: {error}")
    if as_json:
        print_json(document)
    else:
        print_description(document, make_console())
