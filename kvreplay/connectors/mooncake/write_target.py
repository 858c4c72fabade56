"""The receiving end of engine writes: a consumer's memory, as its producers' transfer engines reach it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.mooncake.memory import Contents, RankMemory, UnregisteredMemoryError
from kvreplay.connectors.mooncake.plan import Piece, WriteSegment
from kvreplay.connectors.mooncake.settlement import Pull
from kvreplay.connectors.mooncake.structs import WriteData
from kvreplay.kv.integrity import checksums, damage_mask
from kvreplay.kv.memory import Provenance
from kvreplay.sim.envelope import Corruption, Envelope


class Damage(NamedTuple):
    """A corruption, and the block of its segment that it hits."""

    block: int
    corruption: Corruption


@dataclass(slots=True, kw_only=True)
class WriteTarget:
    """Carries out writes as they arrive. `verifies`, `fences`: the switches transfer_integrity, transfer_fence."""

    memory: RankMemory
    session: str
    verifies: bool
    fences: bool
    find_pull: Callable[[str, int], Pull | None]
    """(conversation, attempt) → the pull, if it is still open."""

    def write(self, envelope: Envelope) -> int:
        """What the engine call returns: 0, or -1 with nothing, or only a part, of it in memory."""
        data: WriteData = envelope.payload
        if data.session != self.session:
            return -1
        pull = self.find_pull(data.pull, data.attempt)
        if self.fences and not _is_wanted(pull, data.segments):
            return -1
        if data.lands is not None or not envelope.write_result:
            try:
                damages = _damages(envelope.corruptions, data) if envelope.corruptions else {}
                if not self._land(data, pull, damages, envelope.fault_handle):
                    return -1
            except UnregisteredMemoryError:
                return -1
        return envelope.write_result or 0

    def _land(self, data: WriteData, pull: Pull | None, damages: dict[int, list[Damage]], envelope_fault: int) -> bool:
        """Copy what this delivery brings. False if the producer has nothing to read any more."""
        counts = self.verifies and pull is not None and _is_new(data, pull)
        for segment, piece in data.landing():
            contents = data.read(piece)
            if contents is None:
                return False
            # A late write's blocks may belong to someone else by now.
            is_wanted = pull is not None and segment.request_id in pull.open
            provenance = Provenance(segment.transfer_id, segment.request_id, "", envelope_fault, asked_for=is_wanted)
            if damages:
                piece, contents = self._damage(segment, piece, contents, damages)
            part = piece.copy.part
            self.memory.write(
                piece.copy.remote, piece.block_ids, part.target_offset, part.length, contents, provenance=provenance
            )
            if damages and not self.verifies:
                self._mark_corrupted(segment, piece, damages)
            if counts and pull is not None:
                coverage = pull.metas[segment.request_id].coverage
                if coverage is not None:
                    coverage.add(segment.group, piece.block_ids, part.length)
        return True

    def _damage(
        self, segment: WriteSegment, piece: Piece, contents: Contents, damages: dict[int, list[Damage]]
    ) -> tuple[Piece, Contents]:
        """What arrives of a piece. With checksums only blocks that have the sender's."""
        hits = _hits(damages.get(id(segment)), segment, piece)
        if not hits:
            return piece, contents
        delivered = _damaged(contents, hits)
        if not self.verifies:
            return piece, delivered
        is_good = _is_good(contents, delivered, hits)
        ids = [np.asarray(block_ids, np.int64)[is_good] for block_ids in piece[1:]]
        return Piece(piece.copy, *ids), delivered[is_good]

    def _mark_corrupted(self, segment: WriteSegment, piece: Piece, damages: dict[int, list[Damage]]) -> None:
        for block, corruption in _hits(damages.get(id(segment)), segment, piece):
            self.memory.mark_corrupted(
                piece.copy.remote,
                int(piece.block_ids[block]),
                Provenance(segment.transfer_id, segment.request_id, corruption.fault_spec, corruption.fault_handle),
            )


def _is_new(data: WriteData, pull: Pull) -> bool:
    """Whether this part of the write arrives for the first time. What is delivered twice counts once."""
    part = (data.pull, data.write_id, None if data.lands is None else data.lands.start)
    seen = [
        coverage.is_new(part)
        for request_id in dict.fromkeys(segment.request_id for segment in data.segments)
        if (coverage := pull.metas[request_id].coverage) is not None
    ]
    return all(seen)


def _is_wanted(pull: Pull | None, segments: Sequence[WriteSegment]) -> bool:
    return pull is not None and all(segment.request_id in pull.open for segment in segments)


def _is_good(sent: Contents, delivered: Contents, hits: Sequence[Damage]) -> NDArray[np.bool_]:
    """Which blocks have the sender's checksum."""
    if sent.shape[1]:
        same: NDArray[np.bool_] = checksums(sent) == checksums(delivered)
        return same
    # Without contents there is nothing to sum up: what was damaged is known to be.
    is_good = np.ones(len(sent), dtype=np.bool_)
    is_good[[hit.block for hit in hits]] = False
    return is_good


def _damages(corruptions: Sequence[Corruption], data: WriteData) -> dict[int, list[Damage]]:
    """The corruptions by segment, which its identity names. One without a block is drawn from all of the write.

    A block that another fault has cut off the write is not there to be changed.
    """
    damages: dict[int, list[Damage]] = {}
    for corruption in corruptions:
        block = corruption.draw % max(data.num_blocks, 1) if corruption.block is None else corruption.block
        for segment in data.segments:
            if block < len(segment.block_ids):
                damages.setdefault(id(segment), []).append(Damage(block, corruption))
                break
            block -= len(segment.block_ids)
    return damages


def _hits(damages: Sequence[Damage] | None, segment: WriteSegment, piece: Piece) -> Sequence[Damage]:
    """Those damages of a segment that hit this piece of it, by the place of the block in the piece."""
    if not damages or piece.block_ids is segment.block_ids:
        return damages or ()
    places = {int(block_id): place for place, block_id in enumerate(piece.block_ids)}
    hits = []
    for damage in damages:
        place = places.get(int(segment.block_ids[damage.block]))
        if place is not None:
            hits.append(Damage(place, damage.corruption))
    return hits


def _damaged(contents: Contents, hits: Sequence[Damage]) -> Contents:
    if not hits:
        return contents
    delivered = contents.copy()
    for block, corruption in hits:
        delivered[block] ^= damage_mask(corruption.draw, contents.shape[1]).astype(contents.dtype)
    return delivered
