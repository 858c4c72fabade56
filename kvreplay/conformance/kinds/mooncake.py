"""Transcripts of the Mooncake connector between a producer and a consumer, and its frames."""

from collections.abc import Sequence
from typing import Final

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.vector import UnsupportedVectorError, Vector

_FRAMES: Final = frozenset({"requests", "responses"})


class MooncakeVectors:
    name = "mooncake"

    def recognises(self, vector: Vector) -> bool:
        return "scenario" in vector.document or vector.document.keys() >= _FRAMES

    def replay(self, vector: Vector) -> Sequence[Difference]:
        raise UnsupportedVectorError("Mooncake transcript")
