"""`kvreplay conformance`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvreplay.cli.common import JsonOption, ProcessStatus, chosen, make_console, print_error, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvreplay.conformance.suite import Outcome


def conformance(
    places: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PLACE]...", help="Vectors, or folders of them. Default: tests/conformance, of a checkout."
        ),
    ] = None,
    *,
    show_all: Annotated[bool, typer.Option("--all", "-v", help="List the vectors that are equal, too.")] = False,
    check: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="Also play each scheduler vector with KV contents and checkers on, as this profile behaves, and list "
            "the laws that it breaks.",
        ),
    ] = None,
    transport: Annotated[
        str,
        typer.Option(
            "--transport",
            metavar="virtual|zmq",
            help="zmq: Mooncake's frames, writes and queries go over real sockets; vectors without any are skipped.",
        ),
    ] = "virtual",
    as_json: JsonOption = False,
) -> None:
    """Replay recorded decisions of a real engine, and show where ours decides otherwise.

    A vector is a JSON file with a small workload and, step by step, what the real scheduler did with it. Folders are
    searched through; JSON that is no vector is ignored, a kind of vector that is not modelled is skipped.

    Exits 0 if no vector differs, 2 if one is broken, 3 if one differs. What `--check` finds does not count.
    """
    from kvreplay.behaviour import profile
    from kvreplay.conformance.suite import NO_SOCKETS, Result, default_places, replay_files
    from kvreplay.conformance.vector import find_files
    from kvreplay.errors import ConfigError
    from kvreplay.report.conformance import conformance_document, print_outcome, print_skipped, print_tallies

    console = make_console()
    checked = profile(check, "--check") if check is not None else None
    over = chosen("--transport", transport, ("virtual", "zmq"))
    wanted = places or default_places()
    outcomes: list[Outcome] = []
    for outcome in replay_files(find_files(wanted), checked, over):
        outcomes.append(outcome)
        if outcome.reason == NO_SOCKETS:
            continue
        if outcome.result is Result.BROKEN:
            print_error(f"{outcome.path}: {outcome.reason}")
        elif not as_json and (show_all or outcome.findings or outcome.result is not Result.EQUAL):
            print_outcome(console, outcome)
    if not outcomes:
        raise ConfigError(f"{', '.join(map(str, wanted))}: no vectors found")
    status = exit_status(outcomes)
    if as_json:
        print_json(conformance_document(outcomes, status))
    else:
        print_skipped(console, outcomes, NO_SOCKETS)
        print_tallies(console, outcomes)
    raise typer.Exit(status)


def exit_status(outcomes: "Sequence[Outcome]") -> int:
    """A difference before a broken vector: there may be more of these behind."""
    from kvreplay.conformance.suite import Result
    from kvreplay.verdict.exit_status import ExitStatus

    results = {outcome.result for outcome in outcomes}
    if Result.DIFFERS in results:
        return ExitStatus.VIOLATED
    return ProcessStatus.USAGE if Result.BROKEN in results else ProcessStatus.DONE
