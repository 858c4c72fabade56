"""The two exceptions that leave a function on purpose.

A third kind of failure, kvreplay's own bug, is an `assert`: a traceback and exit status 1.
"""


class KvReplayError(Exception):
    """A mistake of the user's: printed in one line that names the file, key or flag; exit status 2."""


class ConfigError(KvReplayError):
    """A configuration, fault or command-line setting that cannot be used."""


class TraceError(KvReplayError):
    """An input file that cannot be read as what it should be."""


class EngineFatal(Exception):  # noqa: N818 - it is not our error, it is the engine's death
    """The replayed engine dies here, as the real one would (EngineCoreProc, "engine dead").

    `exception` is the type the real engine raises, for instance `AssertionError`; `message` the start of
    its text. Only the model of the engine raises this, and only the instance catches it.
    """

    def __init__(self, exception: str, message: str = "") -> None:
        super().__init__(f"{exception}: {message}" if message else exception)
        self.exception = exception
        self.message = message


def engine_asserts(condition: bool, text: str = "", *, where: str = "") -> None:  # noqa: FBT001 - reads as an assertion
    """An assertion of vLLM's, `text`, in its function `where`: if it does not hold, the engine dies."""
    if not condition:
        raise EngineFatal("AssertionError", f"{where}: {text}" if where else text)
