"""Transcripts of the Mooncake connector between a producer and a consumer, and its frames."""

from collections.abc import Sequence
from typing import Final

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.vector import Vector

_FRAMES: Final = frozenset({"requests", "responses"})


class MooncakeVectors:
    name = "mooncake"

    def recognises(self, vector: Vector) -> bool:
        return "scenario" in vector.document or vector.document.keys() >= _FRAMES

    def replay(self, vector: Vector) -> Sequence[Difference]:
        from kvreplay.conformance.mooncake_frames import replay_frames
        from kvreplay.conformance.mooncake_vectors import replay_transcript

        if "scenario" in vector.document:
            return replay_transcript(vector.document)
        return replay_frames(vector.document)
