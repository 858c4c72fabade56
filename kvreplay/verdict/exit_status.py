"""The verdicts' exit statuses. Those of a process that comes to no verdict are `cli.common.ProcessStatus`."""

from enum import IntEnum


class ExitStatus(IntEnum):
    PASSED = 0
    VIOLATED = 3
    STALLED = 4
    CRASHED = 5
