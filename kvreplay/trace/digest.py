"""Hashes of input files: how a trace names what it was made from, without a path."""

from hashlib import blake2b
from pathlib import Path

from kvreplay.errors import TraceError
from kvreplay.user_files import reason


def file_digest(path: Path) -> str:
    """32 hex digits of the file's bytes."""
    digest = blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                digest.update(piece)
    except OSError as error:
        raise TraceError(f"{path}: cannot be read: {reason(error)}") from error
    return digest.hexdigest()
