"""`kvreplay import`: other tools' files, as traces."""

from pathlib import Path
from typing import Annotated, Any, Final, cast, get_args

import typer

from kvreplay.cli.common import JsonOption, LimitOption, check_name, chosen, make_console, paragraphs, print_json
from kvreplay.errors import TraceError

app = typer.Typer(help="Turn another tool's file into a trace.")


@app.callback()
def import_() -> None:
    """Turn another tool's file into a trace."""


_MOONCAKE_HELP: Final = """Turn a trace of the Mooncake project into one that kvreplay replays.

Each line of FILE is a request: {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47,
...]}, with one id for each 512 tokens of the prompt.
"""


@app.command("mooncake", help=paragraphs(_MOONCAKE_HELP))
def import_mooncake(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="JSON lines of the Mooncake project; .gz too.")],
    *,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="OUT",
            help="Trace to write. Default: FILE's name with .parquet, in the current folder.",
        ),
    ] = None,
    limit: LimitOption = None,
    unit: Annotated[
        str | None,
        typer.Option(
            metavar="ms|s", help="Unit of the timestamps. Default: ms, and a file that looks like seconds is refused."
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    from kvreplay.trace.digest import file_digest
    from kvreplay.trace.importers.mooncake import Unit, read_mooncake
    from kvreplay.trace.schema import TraceMetadata
    from kvreplay.trace.writer import check_output

    known_unit = cast("Unit | None", unit and chosen("--unit", unit, get_args(Unit)))
    target = output or default_output(file)
    check_name(target)
    check_output(target, [file])
    workload = read_mooncake(file, limit=limit, unit=known_unit)
    options = {"limit": limit, "unit": unit or "ms"}
    metadata = TraceMetadata(
        source={"tool": "kvreplay import mooncake", "options": options, "inputs": [file_digest(file)]}
    )
    print_written(target, workload, metadata, as_json=as_json)


def default_output(file: Path) -> Path:
    """The source's name in the current folder: data folders are often shared. Never overwrites."""
    target = Path(file.name.removesuffix(".gz")).with_suffix(".parquet")
    if target.exists():
        raise TraceError(f"{target}: exists already; name it with -o to replace it")
    return target


def print_written(target: Path, workload: Any, metadata: Any, *, as_json: bool) -> None:  # noqa: ANN401 - imported late
    """Write the workload, and say what was written."""
    from kvreplay.trace.describe import describe_workload
    from kvreplay.trace.workload import write_workload

    fingerprint = write_workload(target, workload, metadata)
    described = describe_workload(workload)
    if as_json:
        print_json({"output": str(target), "fingerprint": fingerprint, "workload": described})
        return
    from kvreplay.report.words import percent

    console = make_console()
    console.print(
        f"{described['requests']:,} requests in {described['arrival_span_s']:,.1f} s, "
        f"{described['prompt_tokens']['total']:,} prompt tokens ({percent(described['prefix_sharing'])} shared), "
        f"{described['output_tokens']['total']:,} output tokens",
        soft_wrap=True,
    )
    console.print(f"{target}  fingerprint {fingerprint}", soft_wrap=True, markup=False)
