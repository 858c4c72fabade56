"""Transcripts of the Mooncake connector between a producer and a consumer, and its frames."""

from collections.abc import Sequence
from typing import Final

from kvreplay.conformance.compare import Difference
from kvreplay.conformance.vector import Json, Vector

_FRAMES: Final = frozenset({"requests", "responses"})


class MooncakeVectors:
    name = "mooncake"
    crosses_sockets = True

    def recognises(self, vector: Vector) -> bool:
        return "scenario" in vector.document or vector.document.keys() >= _FRAMES

    def replay(self, vector: Vector, over: str) -> Sequence[Difference]:
        from kvreplay.conformance.mooncake_frames import replay_frames
        from kvreplay.conformance.mooncake_vectors import replay_transcript

        if "scenario" in vector.document:
            return replay_transcript(_whole(vector), over)
        return replay_frames(vector.document)


def _whole(vector: Vector) -> dict[str, Json]:
    """A transcript in JSON lines as one object: after its head come its events, and last what was left."""
    if not vector.lines:
        return vector.document
    lines = [line for line in vector.lines if isinstance(line, dict)]
    finals = [line["final"] for line in lines if "final" in line]
    return {**vector.document, "events": [line for line in lines if "lane" in line], "final": next(iter(finals), None)}
