"""Which bytes one producer rank copies to one consumer rank, per region and block.

The rule for unequal tensor parallel sizes is vLLM's (mooncake_connector.py: _compute_sender_transfer_plan); blocks that
follow each other on both sides become one descriptor, as there (group_concurrent_contiguous).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.mooncake.ranks import Ranks, tp_ratio
from kvreplay.connectors.mooncake.regions import Region, RegionPair
from kvreplay.kv.memory import BlockIds


class BrokenPlanError(Exception):
    """An assertion of vLLM's in the middle of a pull's service does not hold; the text is what it says."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadLayout:
    """How a model's KV cache is spread over tensor parallel ranks.

    `num_kv_heads`: of the whole model. `is_mla`: every rank has it all. `has_states`: a group of Mamba states, whose
    heads are not told apart.
    """

    num_kv_heads: int | None = None
    is_mla: bool = False
    has_states: bool = False

    def is_replicated(self, tp_size: int) -> bool:
        return self.is_mla or (self.num_kv_heads is not None and tp_size > self.num_kv_heads)

    @property
    def uncounted(self) -> "HeadLayout":
        """The same, where nobody asks how many heads there are."""
        return replace(self, num_kv_heads=None)

    @property
    def split_heads(self) -> int | None:
        """The heads by whose number blocks are cut; None: they are cut by the ratio of the sizes."""
        return None if self.is_mla or self.has_states else self.num_kv_heads


class Slice(NamedTuple):
    """Of each block: `length` payload bytes from `source_offset` on go to `target_offset`. Length 0: none."""

    source_offset: int
    target_offset: int
    length: int


def slice_for(local: Ranks, remote_rank: int, remote_size: int, lengths: tuple[int, int], heads: HeadLayout) -> Slice:
    """What the producer's rank sends of each block, whose payload takes `lengths` (own, consumer's) bytes."""
    own_length, peer_length = lengths
    ratio = tp_ratio(local.tp_size, remote_size)
    if ratio == 1:
        return Slice(0, 0, own_length)
    replicated = heads.is_replicated(local.tp_size)
    num_heads = heads.split_heads
    if num_heads is not None and replicated != (remote_size > num_heads):
        return _one_head(local, remote_rank, remote_size, own_length, num_heads)
    if ratio > 0:
        place = local.tp_rank % ratio
        if replicated:
            return Slice(0, 0, 0 if place else own_length)
        return Slice(0, place * own_length, own_length)
    if replicated:
        return Slice(0, 0, own_length)
    return Slice(remote_rank % -ratio * peer_length, 0, peer_length)


def _one_head(local: Ranks, remote_rank: int, remote_size: int, own_length: int, num_heads: int) -> Slice:
    """Heads are replicated on one side only: the first replica of each head sends it."""
    if local.tp_rank % max(local.tp_size // num_heads, 1):
        return Slice(0, 0, 0)
    head = local.tp_rank * num_heads // local.tp_size
    peer_head = remote_rank * num_heads // remote_size
    head_bytes = own_length // max(num_heads // local.tp_size, 1)
    return Slice(max(peer_head - head, 0) * head_bytes, max(head - peer_head, 0) * head_bytes, head_bytes)


@dataclass(frozen=True, slots=True)
class RegionCopy:
    """One region's part of every block that is copied."""

    local: Region
    remote: Region
    part: Slice

    @property
    def merges(self) -> bool:
        """Whole blocks without gaps on either side: blocks that follow each other are one descriptor."""
        length = self.part.length
        starts_blocks = self.part.source_offset == 0 and self.part.target_offset == 0
        return starts_blocks and length == self.local.block_len == self.remote.block_len

    @property
    def is_sound(self) -> bool:
        part = self.part
        return (
            part.source_offset + part.length <= self.local.kv_block_len
            and part.target_offset + part.length <= self.remote.kv_block_len
        )

    def check(self) -> None:
        """Raises BrokenPlanError if the part does not lie within its blocks."""
        if self.part.source_offset + self.part.length > self.local.kv_block_len:
            raise BrokenPlanError("Computed source transfer region exceeds local KV block size.")
        if self.part.target_offset + self.part.length > self.remote.kv_block_len:
            raise BrokenPlanError("Destination transfer region exceeds remote KV block size.")


class WriteSegment(NamedTuple):
    """The blocks of one request in one KV cache group: source i goes to destination i."""

    request_id: str
    """The consumer's request."""
    transfer_id: str
    group: int
    source_block_ids: BlockIds
    block_ids: BlockIds


class Piece(NamedTuple):
    """Blocks of one region: what one descriptor, or one copy of many blocks at once, moves."""

    copy: RegionCopy
    source_block_ids: BlockIds
    block_ids: BlockIds

    @property
    def descriptor(self) -> tuple[int, int, int]:
        """(source address, destination address, bytes), where the blocks follow each other."""
        copy = self.copy
        return (
            copy.local.base_addr + int(self.source_block_ids[0]) * copy.local.block_len + copy.part.source_offset,
            copy.remote.base_addr + int(self.block_ids[0]) * copy.remote.block_len + copy.part.target_offset,
            len(self.block_ids) * copy.part.length,
        )


@dataclass(frozen=True, slots=True)
class GroupCost:
    """What a block of one KV cache group costs in a transfer."""

    num_bytes: int = 0
    num_merging: int = 0
    """Regions in which a run of blocks is one descriptor."""
    num_single: int = 0
    """Regions in which every block is one."""


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """All copies from one rank to another; the same for every pull between them."""

    copies: tuple[RegionCopy, ...]
    costs: dict[int, GroupCost] = field(init=False)
    """By KV cache group; a group that is not in it moves no bytes here."""
    num_groups: int = field(init=False)
    """Groups that a request must have, one more than the largest that a region belongs to."""
    has_shared: bool = field(init=False)
    has_strays: bool = field(init=False)
    """Some region belongs to no group at all."""
    broken: tuple[RegionCopy, ...] = field(init=False)
    """Parts that do not lie within their blocks."""
    by_group: dict[int, tuple[RegionCopy, ...]] = field(init=False)
    """What moves bytes of a group's blocks."""

    def __post_init__(self) -> None:
        costs: dict[int, GroupCost] = {}
        for copy in self.copies:
            for group in copy.local.groups if copy.part.length else ():
                known = costs.get(group, GroupCost())
                costs[group] = GroupCost(
                    known.num_bytes + copy.part.length,
                    known.num_merging + copy.merges,
                    known.num_single + (not copy.merges),
                )
        groups = [group for copy in self.copies for group in copy.local.groups]
        by_group = {
            group: tuple(copy for copy in self.copies if copy.part.length and group in copy.local.groups)
            for group in costs
        }
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "by_group", by_group)
        object.__setattr__(self, "num_groups", max(groups, default=-1) + 1)
        object.__setattr__(self, "has_strays", any(group < 0 for group in groups))
        broken = tuple(copy for copy in self.copies if copy.part.length and not copy.is_sound)
        object.__setattr__(self, "broken", broken)
        object.__setattr__(self, "has_shared", any(len(copy.local.groups) > 1 for copy in self.copies))

    def check(self, segments: Sequence[WriteSegment], num_groups: int) -> None:
        """What vLLM asserts while it makes the descriptors of a request with so many groups. Raises BrokenPlanError."""
        if num_groups < self.num_groups or self.has_strays:
            raise BrokenPlanError("Transfer region references a missing KV group.")
        if self.broken:
            present = {segment.group for segment in segments}
            for copy in self.broken:
                if present.intersection(copy.local.groups):
                    copy.check()

    def num_bytes(self, segments: Sequence[WriteSegment]) -> int:
        return sum(len(segment.block_ids) * self.costs[segment.group].num_bytes for segment in segments)

    def num_descriptors(self, segments: Sequence[WriteSegment]) -> int:
        if self.has_shared:
            return sum(1 for _ in self.descriptors(segments))
        total = 0
        for segment in segments:
            cost = self.costs[segment.group]
            total += cost.num_single * len(segment.block_ids)
            if cost.num_merging:
                total += cost.num_merging * (1 + _num_breaks(segment.source_block_ids, segment.block_ids))
        return total

    def pieces(self, segments: Sequence[WriteSegment]) -> Iterator[tuple[WriteSegment, Piece]]:
        """Everything, in as few pieces as there are regions; in no order that matters."""
        for segment in segments:
            for copy in self.by_group[segment.group]:
                yield segment, Piece(copy, segment.source_block_ids, segment.block_ids)

    def descriptors(self, segments: Sequence[WriteSegment]) -> Iterator[tuple[WriteSegment, Piece]]:
        """Everything as the engine gets it: request by request, region by region, run by run."""
        by_request: dict[str, dict[int, WriteSegment]] = {}
        for segment in segments:
            by_request.setdefault(segment.request_id, {})[segment.group] = segment
        for by_group in by_request.values():
            for copy in self.copies:
                present = [by_group[group] for group in copy.local.groups if group in by_group]
                if copy.part.length and present:
                    # A run may go through several groups of a shared region: the first stands for the request.
                    yield from ((present[0], piece) for piece in _runs(copy, present))


NOTHING: Final = TransferPlan(())
"""No region is shared: nothing to copy."""


def make_plan(
    pairs: Sequence[RegionPair], local: Ranks, remote_rank: int, remote_size: int, heads: HeadLayout
) -> TransferPlan:
    copies = [
        RegionCopy(
            own, peers, slice_for(local, remote_rank, remote_size, (own.kv_block_len, peers.kv_block_len), heads)
        )
        for own, peers in pairs
    ]
    return TransferPlan(tuple(copies))


def _runs(copy: RegionCopy, segments: Sequence[WriteSegment]) -> Iterator[Piece]:
    source, target = (
        np.concatenate([np.asarray(segment[place], np.int64) for segment in segments]) for place in (3, 4)
    )
    if copy.merges:
        starts = [0, *(_ends_run(source, target).nonzero()[0] + 1).tolist(), len(source)]
    else:
        starts = list(range(len(source) + 1))
    for start, end in pairwise(starts):
        if start < end:
            yield Piece(copy, source[start:end], target[start:end])


def _ends_run(source: NDArray[np.int64], target: NDArray[np.int64]) -> NDArray[np.bool_]:
    """By place: whether a run ends there, on either side."""
    ends: NDArray[np.bool_] = (source[1:] - source[:-1] != 1) | (target[1:] - target[:-1] != 1)
    return ends


def _num_breaks(source: BlockIds, target: BlockIds) -> int:
    return int(np.count_nonzero(_ends_run(np.asarray(source, np.int64), np.asarray(target, np.int64))))
