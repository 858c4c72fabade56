"""What commands share: options, consoles, JSON on stdout, errors in one line. Light at import."""

import json
import os
import sys
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TextIO

import typer

if TYPE_CHECKING:
    from rich.console import Console


class ProcessStatus(IntEnum):
    """How the process ends where no verdict (`verdict.exit_status.ExitStatus`) says so."""

    DONE = 0
    BUG = 1  # ours: what Python exits with after an exception that nobody catches, and what nothing else may use
    USAGE = 2
    INTERRUPTED = 130
    PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell shows it


JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, and nothing else.")]
ConfigOption = Annotated[
    str | None,
    typer.Option("--config", metavar="NAME|FILE", help="Preset or TOML file. Default: the trace's own config."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change one key, as cache.num_gpu_blocks=512. Repeatable."),
]
PolicyOption = Annotated[
    str | None, typer.Option("--policy", metavar="fail|recompute", help="What a failed KV load costs its request.")
]
ProfileOption = Annotated[
    str | None,
    typer.Option("--profile", metavar="NAME", help="Known behaviours to replay (see profiles). Default: vllm-0.33."),
]
BehaviourOption = Annotated[
    list[str] | None,
    typer.Option("--behaviour", metavar="NAME=VALUE", help="One switch, on top of the profile. Repeatable."),
]
MAX_SEED: Final = 2**63 - 1


def _check_seed(seed: int) -> int:
    """Here rather than as typer's `max`, whose digits would fill the help."""
    from kvreplay.errors import ConfigError

    if seed > MAX_SEED:
        raise ConfigError(f"--seed {seed}: expected at most {MAX_SEED}")
    return seed


SeedOption = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, callback=_check_seed, help="Seed of every random draw.")
]
LimitOption = Annotated[int | None, typer.Option("--limit", metavar="N", min=1, help="Take the first N requests only.")]


def chosen(flag: str, value: str, choices: Collection[str]) -> str:
    """`value`, if it is one of `choices`. Raises ConfigError naming the flag and the nearest choice."""
    from kvreplay.behaviour import nearest
    from kvreplay.errors import ConfigError

    if value not in choices:
        raise ConfigError(
            f"{flag} {value}: expected one of {', '.join(choices)}{nearest(value, [str(choice) for choice in choices])}"
        )
    return value


def trace_name(text: str) -> str:
    """TRACE as given, but a canned one may have its suffix, as a report names it.

    A file goes before a canned trace: one that has the very name of a trace is worth a warning.
    """
    from kvreplay.replay.presets import packaged_names

    name, canned = text.removesuffix(".parquet"), packaged_names("traces", ".parquet")
    if text in canned and Path(text).is_file():
        print_warning(f"{text}: the file of this name, not the canned trace")
    return name if not Path(text).exists() and name in canned else text


def check_name(output: Path) -> None:
    """Refuse an output that would hide a canned trace. Raises ConfigError."""
    from kvreplay.errors import ConfigError
    from kvreplay.replay.presets import packaged_names

    if output.name in packaged_names("traces", ".parquet"):
        raise ConfigError(f"-o {output}: is the name of a canned trace, which it would hide; expected {output}.parquet")


def paragraphs(text: str) -> str:
    """Help text without the line breaks of its paragraphs: it is wrapped to the terminal's width."""
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


_LEAST_WIDTH: Final = 20
_UNKNOWN_WIDTH: Final = 80


def make_console(*, stderr: bool = False) -> "Console":
    """A console with colours as NO_COLOR and the terminal say, and the width that COLUMNS or the terminal gives.

    Terminals that do not know their size say 0, which is no width to print in.
    """
    from rich.console import Console

    console = Console(stderr=stderr, highlight=False)
    if console.width < _LEAST_WIDTH:
        console.width = _UNKNOWN_WIDTH
    return console


def print_json(document: Mapping[str, Any]) -> None:
    """The one object that `--json` prints."""
    sys.stdout.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def print_error(message: str) -> None:
    """`error: …` on stderr, in one unwrapped line that says nothing to the terminal."""
    _say("error:", "red", message)


def print_warning(message: str) -> None:
    """`warning: …` on stderr, likewise."""
    _say("warning:", "yellow", message)


def _say(what: str, style: str, message: str) -> None:
    from rich.text import Text

    line = Text.assemble((what, style), " ", one_line(message))
    try:
        make_console(stderr=True).print(line, soft_wrap=True)
    except OSError:
        # There is nobody to be told, which is no reason to end otherwise. What is in the buffer would be tried again.
        redirect_to_nowhere(sys.stderr)


def redirect_to_nowhere(stream: TextIO) -> None:
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def one_line(text: str) -> str:
    """Line breaks and control characters, which may come from a file or a peer, as escapes."""
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )
