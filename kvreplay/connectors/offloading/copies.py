"""Which block of which chunk each GPU block of a job goes to, and moving the words (vLLM: cpu/gpu_worker.py).

A job's first chunk in a group may begin before its first block: those sub-blocks are skipped.
"""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from kvreplay.connectors.offloading.cpu_buffers import CpuBuffers, Places
from kvreplay.connectors.offloading.layout import OffloadLayout
from kvreplay.connectors.offloading.structs import TransferJob
from kvreplay.errors import engine_asserts
from kvreplay.kv.content import WordArray
from kvreplay.kv.integrity import damage_mask
from kvreplay.kv.memory import History, KVMemory, Provenance
from kvreplay.kv.prefix_cache import BlockIds
from kvreplay.sim.envelope import Corruption

_engine_asserts = partial(engine_asserts, where="transfer_async")


class GroupCopy(NamedTuple):
    """One group's blocks of a job, and where each is in the CPU tier."""

    group_id: int
    block_ids: BlockIds
    places: Places


def group_copies(job: TransferJob, layout: OffloadLayout) -> Iterable[GroupCopy]:
    """Raises EngineFatal where the chunks do not match the blocks, as the copy engine's assertions do."""
    if layout.blocks_per_chunk == 1 and len(job.chunk_ids) == len(job.gpu.block_ids):
        return _one_for_one(job, layout)
    return _spread(job, layout)


def _spread(job: TransferJob, layout: OffloadLayout) -> Iterator[GroupCopy]:
    """The same for chunks of several blocks, and whatever does not match."""
    size = layout.blocks_per_chunk
    next_block = next_chunk = 0
    for group, num_blocks, first in zip(layout.groups, job.gpu.group_sizes, job.gpu.block_indices, strict=True):
        if not num_blocks:
            continue
        skipped = first % size
        num_chunks = -(-(num_blocks + skipped) // size)
        chunk_ids = job.chunk_ids[next_chunk : next_chunk + num_chunks]
        _engine_asserts(len(chunk_ids) == num_chunks, "end_offset <= num_blocks")
        places = chunk_ids
        if size > 1:
            places = (chunk_ids[:, np.newaxis] * size + np.arange(size)).ravel()[skipped : skipped + num_blocks]
        yield GroupCopy(group.group_id, job.gpu.block_ids[next_block : next_block + num_blocks], places)
        next_block += num_blocks
        next_chunk += num_chunks
    _engine_asserts(next_block == len(job.gpu.block_ids), "dst_offset == num_dst_blocks")
    _engine_asserts(next_chunk == len(job.chunk_ids), "src_offset == num_src_blocks")


def _one_for_one(job: TransferJob, layout: OffloadLayout) -> list[GroupCopy]:
    """The same for chunks of one block."""
    gpu, places = job.gpu, job.chunk_ids
    sizes = gpu.group_sizes
    if len(places) in sizes:  # all are one group's
        return [GroupCopy(layout.groups[sizes.index(len(places))].group_id, gpu.block_ids, places)]
    copies = []
    start = 0
    for group, num_blocks in zip(layout.groups, sizes, strict=True):
        if num_blocks:
            end = start + num_blocks
            copies.append(GroupCopy(group.group_id, gpu.block_ids[start:end], places[start:end]))
            start = end
    return copies


def size_bytes(job: TransferJob, layout: OffloadLayout) -> int:
    """On one rank."""
    size_bytes = 0
    for index, size in enumerate(job.gpu.group_sizes):
        if size:
            size_bytes += size * layout.groups[index].bytes_per_block
    return size_bytes


def store(
    job: TransferJob,
    layout: OffloadLayout,
    memory: KVMemory,
    buffers: CpuBuffers,
    corruptions: Sequence[Corruption],
    *,
    verifies: bool,
) -> bool:
    """GPU to CPU: the blocks' words as they are now, whoever they belong to by now. False if `verifies` and something
    is not what was sent."""
    num_before, is_good = 0, True
    for copy in group_copies(job, layout):
        sent = memory.read_blocks(copy.group_id, copy.block_ids)
        hits = _hits(corruptions, job, num_before, len(copy.block_ids)) if corruptions else ()
        buffers.write(copy.places, _damaged(sent, hits) if hits else sent, sent=sent)
        _note_damage(copy, memory, buffers)
        for index, corruption in hits:
            buffers.damaged[int(copy.places[index])] = History(_provenance(job, corruption), None)
        # Words that no corruption has met are those that were sent.
        is_good &= not (verifies and hits)
        num_before += len(copy.block_ids)
    return is_good


def _note_damage(copy: GroupCopy, memory: KVMemory, buffers: CpuBuffers) -> None:
    """What is wrong already on the GPU is wrong in the tier, too."""
    known = memory.histories(copy.block_ids)
    if known:
        for block_id, place in zip(copy.block_ids.tolist(), copy.places.tolist(), strict=True):
            if block_id in known:
                buffers.damaged[place] = known[block_id]


def load(
    job: TransferJob,
    layout: OffloadLayout,
    memory: KVMemory,
    buffers: CpuBuffers,
    corruptions: Sequence[Corruption],
    *,
    verifies: bool,
) -> bool:
    """CPU to GPU. False if `verifies` and something is not what was stored; that is then not written."""
    num_before, is_good = 0, True
    for copy in group_copies(job, layout):
        is_real = copy.block_ids != 0
        num_words = memory.read_blocks(copy.group_id, copy.block_ids[:1]).shape[1]
        stored = buffers.read(copy.places, num_words)
        hits = _hits(corruptions, job, num_before, len(copy.block_ids))
        words = _damaged(stored, hits)
        if verifies:
            matches = buffers.matches(copy.places, words)
            if not num_words:
                matches[[index for index, _ in hits]] = False
            is_good &= bool(matches[is_real].all())
            is_real &= matches
        # The request that loads is the one that holds the blocks, unless something has gone very wrong.
        owner = Provenance(f"job {job.job_id}", job.req_id) if job.is_sync else None
        memory.write_blocks(copy.group_id, copy.block_ids[is_real], words[is_real], provenance=owner)
        _mark_damage(job, copy, memory, buffers, hits, is_real.nonzero()[0].tolist())
        num_before += len(copy.block_ids)
    return is_good


def _mark_damage(
    job: TransferJob,
    copy: GroupCopy,
    memory: KVMemory,
    buffers: CpuBuffers,
    hits: Sequence[tuple[int, Corruption]],
    written: list[int],
) -> None:
    """Name the fault behind each block that was brought damaged: on this way, or on the way into the tier."""
    if not hits and not buffers.damaged:
        return
    hit = {index: _provenance(job, corruption) for index, corruption in hits}
    for index in written:
        block_id, history = int(copy.block_ids[index]), buffers.damaged.get(int(copy.places[index]))
        if index in hit:
            memory.mark_corrupted(block_id, hit[index])
        elif history is not None:
            memory.set_history(block_id, history)


def _provenance(job: TransferJob, corruption: Corruption) -> Provenance:
    return Provenance(f"job {job.job_id}", job.req_id, corruption.fault_spec, corruption.fault_handle)


def _hits(
    corruptions: Sequence[Corruption], job: TransferJob, num_before: int, num_blocks: int
) -> list[tuple[int, Corruption]]:
    """Corruptions of blocks [num_before, num_before + num_blocks) of the job, by their place from there on."""
    if not corruptions:
        return []
    total = max(len(job.gpu.block_ids), 1)
    numbers = [
        (corruption.draw if corruption.block is None else corruption.block) % total for corruption in corruptions
    ]
    return [
        (number - num_before, corruption)
        for number, corruption in zip(numbers, corruptions, strict=True)
        if num_before <= number < num_before + num_blocks
    ]


def _damaged(words: WordArray, hits: Sequence[tuple[int, Corruption]]) -> WordArray:
    if not hits:
        return words
    damaged = words.copy()
    for index, corruption in hits:
        damaged[index] ^= damage_mask(corruption.draw, words.shape[1])
    return damaged
