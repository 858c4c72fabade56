"""Vectors as files: what a real engine did, to be replayed and compared."""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NoReturn, TypeAlias

from kvreplay.errors import ConfigError
from kvreplay.user_files import read_at_most, reason

Json: TypeAlias = Any

FORMAT: Final = 1
SUFFIXES: Final = (".json", ".jsonl")
MAX_BYTES: Final = 64 << 20
_LARGEST: Final = (1 << 64) - 1
_MAX_DIGITS: Final = 20
"""Whole numbers are hashes and addresses at most: of 64 bits."""


class UnsupportedVectorError(ConfigError):
    """A vector that cannot be replayed, though nothing is wrong with it; the message says what it needs."""


@dataclass(frozen=True, slots=True)
class Vector:
    """`document` is the file's object; of a transcript in JSON lines its head, and `lines` what follows."""

    path: Path
    document: dict[str, Json]
    lines: Sequence[Json] = ()

    @property
    def oracle(self) -> str:
        """The engine that it was recorded from, as `vllm 0.33.0`; libraries that follow are left out."""
        oracle = self.document.get("oracle")
        if not isinstance(oracle, str) or not oracle.partition(",")[0]:
            raise ConfigError(f"oracle: expected the name of an engine, got {json.dumps(oracle)}")
        return oracle.partition(",")[0]


def find_files(places: Iterable[Path]) -> list[Path]:
    """Files as they are given; of folders, but not hidden ones inside, what may be JSON, in order of name.

    Raises ConfigError.
    """
    found: dict[Path, None] = {}
    for place in places:
        if place.is_dir():
            found.update(dict.fromkeys(sorted(_files_inside(place))))
        elif place.exists():
            found[place] = None
        else:
            raise ConfigError(f"{place}: no such file or folder")
    return list(found)


def _files_inside(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.suffix in SUFFIXES and not hidden and path.is_file():
            yield path


def read_vector(path: Path) -> Vector | None:
    """None for JSON that is no vector. Raises ConfigError for what is no JSON at all, which may be a broken vector."""
    documents = read_documents(path)
    head = documents[0] if documents else None
    if not isinstance(head, dict) or not ("oracle" in head or {"workload", "steps"} <= head.keys()):
        return None
    return Vector(path, head, documents[1:])


def read_documents(path: Path) -> list[Json]:
    """The one document of a file, or one for each of its lines. Raises ConfigError; messages do not name the file."""
    try:
        data = read_at_most(path, MAX_BYTES)
        if data is None:
            raise ConfigError(f"longer than {MAX_BYTES:,} bytes")
        return list(_documents(data.decode()))
    except OSError as error:
        raise ConfigError(f"cannot be read: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"no JSON: byte {error.start} is not UTF-8") from error
    except RecursionError as error:
        raise ConfigError("no JSON that can be read: it is nested too deeply") from error


def _documents(text: str) -> Iterator[Json]:
    try:
        yield _parsed(text)
    except json.JSONDecodeError as whole:
        lines = [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
        if len(lines) < 2 or not _is_json(lines[0][1]):
            raise ConfigError(f"no JSON: line {whole.lineno}: {_worded(whole)}") from whole
        for number, line in lines:
            try:
                yield _parsed(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"no JSON: line {number}: {_worded(error)}") from error


def _parsed(text: str) -> Json:
    return json.loads(text, parse_int=_whole_number, parse_float=_number, parse_constant=_refuse)


def _whole_number(text: str) -> int:
    number = int(text) if len(text) <= _MAX_DIGITS else _refuse(text)
    return number if -_LARGEST <= number <= _LARGEST else _refuse(text)


def _number(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _refuse(text: str) -> NoReturn:
    raise ConfigError(f"no engine counts so far: {text:.40}")


def _worded(error: json.JSONDecodeError) -> str:
    return error.msg[:1].lower() + error.msg[1:].removesuffix(" starting at")


def _is_json(line: str) -> bool:
    try:
        _parsed(line)
    except json.JSONDecodeError:
        return False
    return True
