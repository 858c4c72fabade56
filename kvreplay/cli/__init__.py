"""The command line. Nothing heavy is imported before a command needs it, so that `--help` is instant."""

import gc
import os
import sys
from typing import Final, NoReturn, TextIO

_OBJECTS_PER_COLLECTION: Final = 100_000
"""Python's 700 would have the collector look hundreds of times at what imports leave, none of which is garbage."""


def main() -> NoReturn:
    """Entry point of `kvreplay` and `python -m kvreplay`."""
    gc.set_threshold(_OBJECTS_PER_COLLECTION)
    if not __debug__:
        # Asserts tell a bug of ours from the replayed engine's misbehaviour; without them a verdict means nothing.
        sys.stderr.write("error: kvreplay needs its asserts; start it without -O and PYTHONOPTIMIZE\n")
        sys.exit(2)  # ProcessStatus.USAGE, without the imports that it takes
    # None where the descriptor was closed before we started.
    sys.stdout = sys.stdout or _unwritable()
    sys.stderr = sys.stderr or _unwritable()
    try:
        from kvreplay.cli.app import run_app

        status = run_app(sys.argv[1:])
    except KeyboardInterrupt:
        # While modules are still being imported, so that ProcessStatus.INTERRUPTED may not be there.
        status = 130
    _leave(status)


def _leave(status: int) -> NoReturn:
    """Exit without taking a heap apart that the operating system gets back as a whole."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        sys.exit(status)
    os._exit(status)


def _unwritable() -> TextIO:
    """In the place of a closed stream: what is written fails as it would there, and is told as that."""
    return os.fdopen(os.open(os.devnull, os.O_RDONLY), "w")
