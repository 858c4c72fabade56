"""How the command line ends."""

from enum import IntEnum


class ExitStatus(IntEnum):
    """Every exit status. 1 stays free for an uncaught exception: kvreplay's own bug."""

    PASSED = 0
    BUG = 1
    USAGE = 2
    VIOLATED = 3
    STALLED = 4
    CRASHED = 5
    INTERRUPTED = 130
