"""The `kvreplay` command: its commands, and how it ends."""

import errno
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Final, cast

import typer
from typer.core import TyperCommand, TyperGroup

from kvreplay import __version__
from kvreplay.cli.common import ProcessStatus, paragraphs, print_error, redirect_to_nowhere
from kvreplay.errors import ConfigError, KvReplayError
from kvreplay.user_files import reason

COMMANDS: Final = (
    ("run", "kvreplay.cli.run:run"),
    ("report", "kvreplay.cli.report:report"),
    ("info", "kvreplay.cli.info:info"),
    ("import", "kvreplay.cli.import_:app"),
    ("synth", "kvreplay.cli.synth:synth"),
    ("faults", "kvreplay.cli.faults:faults"),
    ("profiles", "kvreplay.cli.profiles:profiles"),
    ("conformance", "kvreplay.cli.conformance:conformance"),
)
"""Name → where its function, or its own Typer app, is. These modules import nothing heavy at their top."""

# Public in every version of typer only by way of its subclass.
_UsageError: Final = cast(type[typer.BadParameter], typer.BadParameter.__mro__[1])

_REWORDED: Final = {
    "Value error, ": "",
    "Input should be": "expected",
    "greater than or equal to": "at least",
    "less than or equal to": "at most",
    ", unable to parse string as an integer": "",
    ", unable to parse string as a number": "",
}
"""How some versions of typer pass on what checked a value; others say nothing of the kind."""


class _Once(TyperCommand):
    """Refuses an option that takes one value and is given twice: of two plans, say, the first would be dropped."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        *_, given = self.make_parser(ctx).parse_args(args=list(args))
        seen: list[object] = []
        for option in given:
            if any(option is other for other in seen) and not option.multiple and not getattr(option, "is_flag", False):
                raise ConfigError(f"{max(option.opts, key=len)}: given twice, takes one value")
            if option.param_type_name == "option":
                seen.append(option)
        return super().parse_args(ctx, args)


class _InOrder(TyperGroup):
    """Lists its commands as COMMANDS does; typer alone puts those with commands of their own last."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [name for name, _ in COMMANDS if name in self.commands]


app = typer.Typer(
    name="kvreplay",
    cls=_InOrder,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        typer.echo(f"kvreplay {__version__}")
        raise typer.Exit


_HELP: Final = """Replay scheduler and KV-connector traces of LLM engines, in virtual time, with injected faults.

Exit status: 0 passed, 2 usage or bad input, 3 violated, 4 stalled, 5 crashed, 130 interrupted, 141 the reader of the
output went away, 1 a bug of kvreplay.
"""


@app.callback(invoke_without_command=True, help=paragraphs(_HELP))
def kvreplay(
    context: typer.Context,
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _register() -> None:
    for name, place in COMMANDS:
        module, _, attribute = place.partition(":")
        if find_spec(module) is None:
            continue
        command = getattr(import_module(module), attribute)
        if isinstance(command, typer.Typer):
            for inner in command.registered_commands:
                inner.cls = _Once
            app.add_typer(command, name=name)
        else:
            app.command(name, cls=_Once, help=paragraphs(command.__doc__))(command)


_register()


def run_app(arguments: Sequence[str]) -> int:
    """Run one command line; returns the exit status. Only a bug of ours leaves as an exception."""
    try:
        status = _run_command(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        status = ProcessStatus.INTERRUPTED
    except BrokenPipeError:
        status = ProcessStatus.PIPE_CLOSED
    except SystemExit as error:
        # Rich's and typer's answer to a closed pipe is status 1, which we keep for our own bugs.
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        status = ProcessStatus.PIPE_CLOSED
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EBADF) and error.filename is None:
            raise
        print_error(f"{error.filename or 'standard output'}: {reason(error)}")
        status = ProcessStatus.USAGE
    if status:
        _discard_unwritable_output()
    return status


def _run_command(arguments: Sequence[str]) -> int:
    for argument in arguments:
        # What a shell passes on as bytes could stand in no trace and no JSON.
        if not argument.isascii() and any("\ud800" <= character <= "\udfff" for character in argument):
            print_error(f"{argument}: is not UTF-8 text")
            return ProcessStatus.USAGE
    empty = _empty(arguments)
    if empty is not None:
        print_error(f"{empty}: must not be empty")
        return ProcessStatus.USAGE
    try:
        status = app(args=list(arguments), prog_name="kvreplay", standalone_mode=False)
    except KvReplayError as error:
        print_error(str(error))
        return ProcessStatus.USAGE
    except _UsageError as error:
        print_error(_worded(error, arguments))
        return ProcessStatus.USAGE
    except typer.Abort:
        return ProcessStatus.INTERRUPTED
    # Commands return None or raise typer.Exit, whose code comes back as the result.
    return status if isinstance(status, int) else ProcessStatus.DONE


def _empty(arguments: Sequence[str]) -> str | None:
    """The first argument, or option, whose value is an empty text, which means nothing anywhere."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        if not argument:
            return f"{before} ''" if before.startswith("-") else "argument ''"
        option, equals, value = argument.partition("=")
        if option.startswith("--") and equals and not value:
            return f"{option} ''"
    return None


def _worded(error: typer.BadParameter, arguments: Sequence[str]) -> str:
    """Typer's message in the style of ours: lower case, no full stop, the value that was given, and where to look."""
    message = error.format_message().rstrip(".")
    for words, ours in _REWORDED.items():
        message = message.replace(words, ours)
    value = _value_of(getattr(error, "param", None), arguments)
    if value is not None and repr(value) not in message and f": {value} " not in message:
        message += f", got {value!r}"
    context = error.ctx
    hint = f" (see '{context.command_path} --help')" if context is not None else ""
    return message[:1].lower() + message[1:] + hint


def _value_of(option: object, arguments: Sequence[str]) -> str | None:
    """What an option was given, if it is one and was."""
    for before, argument in zip(("", *arguments), arguments, strict=False):
        for name in getattr(option, "opts", ()):
            if before == name:
                return argument
            if name.startswith("--") and argument.startswith(f"{name}="):
                return argument.removeprefix(f"{name}=")
    return None


def _discard_unwritable_output() -> None:
    """What a full disk or a closed pipe left in the buffer would be tried, and complained about, once more at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        redirect_to_nowhere(sys.stdout)
