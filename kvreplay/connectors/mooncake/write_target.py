"""The receiving end of engine writes: a consumer's memory, as its producers' transfer engines reach it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.mooncake.settlement import Pull
from kvreplay.connectors.mooncake.structs import WriteData, WriteSegment
from kvreplay.kv.content import WordArray
from kvreplay.kv.memory import KVMemory, Provenance
from kvreplay.sim.envelope import Corruption, Envelope

_MIX = np.uint64(0x9E3779B97F4A7C15)


class Damage(NamedTuple):
    """A corruption, and the block of its segment that it hits."""

    block: int
    corruption: Corruption


def checksums(words: WordArray) -> WordArray:
    """One word per block that any change of the block changes."""
    places = np.arange(1, words.shape[1] + 1, dtype=np.uint64) * _MIX
    mixed = (words ^ places) * _MIX
    mixed ^= mixed >> np.uint64(29)
    total: WordArray = (mixed * (places | np.uint64(1))).sum(axis=1, dtype=np.uint64)
    return total


@dataclass(slots=True, kw_only=True)
class WriteTarget:
    """Carries out writes as they arrive. `verifies`, `fences`: the switches transfer_integrity, transfer_fence."""

    memory: KVMemory
    session: str
    verifies: bool
    fences: bool
    find_pull: Callable[[str, int], Pull | None]
    """(conversation, attempt) → the pull, if it is still open."""

    def write(self, envelope: Envelope) -> int:
        """What the engine call returns: 0, or -1 with nothing of it in memory."""
        data: WriteData = envelope.payload
        if data.session != self.session:
            return -1
        if envelope.write_result:
            return envelope.write_result
        pull = self.find_pull(data.pull, data.attempt)
        if self.fences and not _is_wanted(pull, data.segments):
            return -1
        damages = _damages(envelope.corruptions, data)
        for segment, of_segment in zip(data.segments, damages, strict=True):
            words = data.read(segment.group, segment.source_block_ids)
            if words is None:
                return -1
            self._write_segment(segment, words, of_segment, pull)
        return 0

    def _write_segment(
        self, segment: WriteSegment, words: WordArray, damages: Sequence[Damage], pull: Pull | None
    ) -> None:
        is_wanted = pull is not None and segment.request_id in pull.open
        # A late write's blocks may belong to someone else by now.
        provenance = None if is_wanted else Provenance(segment.transfer_id, segment.request_id)
        delivered, block_ids = words, segment.block_ids
        if damages:
            delivered = words.copy()
            for damage in damages:
                delivered[damage.block] ^= _mask(damage.corruption, words.shape[1])
        if self.verifies:
            if damages:
                is_good = _is_good(words, delivered, damages)
                block_ids = np.asarray(block_ids, dtype=np.int64)[is_good]
                delivered = delivered[is_good]
            if pull is not None:
                pull.received.setdefault((segment.request_id, segment.group), []).append(block_ids)
        self.memory.write_blocks(segment.group, block_ids, delivered, provenance=provenance)
        if not self.verifies:
            for block, corruption in damages:
                self.memory.mark_corrupted(
                    int(block_ids[block]),
                    Provenance(segment.transfer_id, segment.request_id, corruption.fault_spec, corruption.fault_handle),
                )


def missing_blocks(pull: Pull, request_id: str) -> list[int]:
    """The request's destination blocks that this pull has not brought, or not with the sender's checksum."""
    missing: list[int] = []
    for group, wanted in enumerate(pull.metas[request_id].local_block_ids):
        received = pull.received.get((request_id, group), [])
        if len(received) != 1 or len(received[0]) != len(wanted):
            right = {int(block_id) for block_ids in received for block_id in block_ids}
            missing += [block_id for block_id in wanted if block_id not in right]
    return missing


def _is_wanted(pull: Pull | None, segments: Sequence[WriteSegment]) -> bool:
    return pull is not None and all(segment.request_id in pull.open for segment in segments)


def _is_good(sent: WordArray, delivered: WordArray, damages: Sequence[Damage]) -> NDArray[np.bool_]:
    """Which blocks have the sender's checksum."""
    if sent.shape[1]:
        same: NDArray[np.bool_] = checksums(sent) == checksums(delivered)
        return same
    # Without contents there is nothing to sum up: what was damaged is known to be.
    is_good = np.ones(len(sent), dtype=np.bool_)
    is_good[[damage.block for damage in damages]] = False
    return is_good


def _damages(corruptions: Sequence[Corruption], data: WriteData) -> list[list[Damage]]:
    """The corruptions by segment. One without a block is drawn from all blocks of the write."""
    damages: list[list[Damage]] = [[] for _ in data.segments]
    for corruption in corruptions:
        block = corruption.draw if corruption.block is None else corruption.block
        block %= max(data.num_blocks, 1)
        for segment, of_segment in zip(data.segments, damages, strict=True):
            if block < len(segment.block_ids):
                of_segment.append(Damage(block, corruption))
                break
            block -= len(segment.block_ids)
    return damages


def _mask(corruption: Corruption, num_words: int) -> WordArray:
    """What changes every word of a block, so that no part of it stays usable by luck."""
    places = np.arange(1, num_words + 1, dtype=np.uint64)
    mask: WordArray = (places * _MIX ^ np.uint64(corruption.draw & 0xFFFF_FFFF_FFFF_FFFF)) | np.uint64(1)
    return mask
