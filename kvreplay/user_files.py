"""Small files of a user's: read with a bound, and refused in words. No file is trusted to be as long as it says."""

import tomllib
from pathlib import Path
from typing import Any

from kvreplay.errors import ConfigError


def reason(error: OSError) -> str:
    """Why, in the system's words and on one line."""
    text = error.strerror or (str(error) or type(error).__name__).splitlines()[0]
    return text[:1].lower() + text[1:]


def read_at_most(path: Path, max_bytes: int) -> bytes | None:
    """The whole file; None if it is longer. Raises OSError."""
    with path.open("rb") as file:
        data = file.read(max_bytes + 1)
    return data if len(data) <= max_bytes else None


def read_toml(path: Path, name: str, max_bytes: int, what: str) -> dict[str, Any]:
    """`what`: the kind of file that is expected. Raises ConfigError, which begins with `name`."""
    try:
        data = read_at_most(path, max_bytes)
    except OSError as error:
        raise ConfigError(f"{name}: {reason(error)}") from error
    if data is None:
        raise ConfigError(f"{name}: larger than {max_bytes} bytes, not a {what}")
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: byte {error.start} is not UTF-8; expected a {what} in TOML") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name}: not TOML: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise ConfigError(f"{name}: not TOML: nested too deeply") from error
