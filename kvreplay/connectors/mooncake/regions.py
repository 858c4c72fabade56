"""Registered KV memory: regions, and how a producer's regions find their counterparts at a consumer.

What fits and what does not is decided as in vLLM (mooncake_connector.py: _align_transfer_regions,
_coalesce_contiguous_transfer_regions, _validate_asymmetric_region_lengths), with its words.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, TypeAlias

from kvreplay.connectors.mooncake.ranks import tp_ratio

SHARED: Final = -1
"""The group index of a region that several KV cache groups share."""
NOT_A_ROW: Final = -1
"""The row offset of a region that is no view of a packed row."""


@dataclass(frozen=True, slots=True)
class Region:
    """One registered tensor. `kv_block_len` of a block's `block_len` bytes are payload."""

    layer_name: str
    layer_index: int
    base_addr: int
    block_len: int
    kv_block_len: int
    group_index: int = 0
    shared_group_ids: tuple[int, ...] = ()
    """The groups that share it; not looked at unless `group_index` is SHARED."""
    row_offset: int = NOT_A_ROW

    @property
    def groups(self) -> tuple[int, ...]:
        return self.shared_group_ids if self.group_index == SHARED else (self.group_index,)


RegionPair: TypeAlias = tuple[Region, Region]
"""A producer's region and the consumer's that has the same layer in it."""


class MisfitError(Exception):
    """The two layouts do not go together; the text is what the consumer is told."""


def align(local: Sequence[Region], remote: Sequence[Region], *, allow_partial_layers: bool) -> list[RegionPair]:
    """Pair regions by layer name, the k-th of a name with the k-th. Raises MisfitError.

    `allow_partial_layers`: pipeline stages are cut differently, so the consumer's rank may lack layers.
    """
    by_occurrence = dict(zip(_occurrences(remote), remote, strict=True))
    pairs: list[RegionPair] = []
    for (name, occurrence), own in zip(_occurrences(local), local, strict=True):
        peers = by_occurrence.get((name, occurrence))
        if peers is not None:
            _check_same_place(own, peers)
            pairs.append((own, peers))
        elif not allow_partial_layers or (name, 0) in by_occurrence:
            raise MisfitError(
                "Mooncake producer registered layer has no matching consumer occurrence: "
                f"{name} occurrence {occurrence}."
            )
    return pairs


def _occurrences(regions: Sequence[Region]) -> list[tuple[str, int]]:
    seen: dict[str, int] = {}
    keys: list[tuple[str, int]] = []
    for region in regions:
        occurrence = seen.get(region.layer_name, 0)
        seen[region.layer_name] = occurrence + 1
        keys.append((region.layer_name, occurrence))
    return keys


def _check_same_place(own: Region, peers: Region) -> None:
    for what, ours, theirs in (
        ("layer", own.layer_index, peers.layer_index),
        ("group", own.group_index, peers.group_index),
    ):
        if ours != theirs:
            raise MisfitError(
                f"Mooncake registered {what} index mismatch for {own.layer_name}: producer={ours}, consumer={theirs}."
            )
    groups, peer_groups = own.shared_group_ids, peers.shared_group_ids
    if groups and peer_groups and groups != peer_groups:
        raise MisfitError(
            f"Mooncake shared-group set mismatch for {own.layer_name}: producer={groups}, consumer={peer_groups}."
        )


# -- packed rows ------------------------------------------------------------------------------------------


def coalesce(pairs: Sequence[RegionPair], *, promote_full_row: bool) -> list[RegionPair]:
    """Merge views of one packed row that follow each other on both sides into one region.

    `promote_full_row`: nothing was left out on either side, so a run from the row's start may become the whole row,
    padding included: then its blocks touch.
    """
    runs: list[list[RegionPair]] = []
    for pair in pairs:
        if runs and all(_follows(runs[-1], pair, side) for side in (0, 1)):
            runs[-1].append(pair)
        else:
            runs.append([pair])
    merged = [(_span(run, 0), _span(run, 1)) for run in runs]
    return [_promoted(pair) for pair in merged] if promote_full_row else merged


def _follows(run: Sequence[RegionPair], pair: RegionPair, side: int) -> bool:
    """Behind the run's last view, padding allowed, and within the row in which the run began."""
    first, last, region = run[0][side], run[-1][side], pair[side]
    return (
        last.group_index == region.group_index
        and last.shared_group_ids == region.shared_group_ids
        and last.block_len == region.block_len
        and last.base_addr + last.kv_block_len <= region.base_addr
        and region.base_addr + region.kv_block_len <= first.base_addr + first.block_len
    )


def _span(run: Sequence[RegionPair], side: int) -> Region:
    first, last = run[0][side], run[-1][side]
    if first is last:
        return first
    return replace(first, kv_block_len=last.base_addr + last.kv_block_len - first.base_addr)


def _promoted(pair: RegionPair) -> RegionPair:
    own, peers = pair
    starts_rows = own.row_offset == 0 and peers.row_offset == 0 and own.block_len == peers.block_len
    if starts_rows and own.kv_block_len <= own.block_len and peers.kv_block_len <= peers.block_len:
        return replace(own, kv_block_len=own.block_len), replace(peers, kv_block_len=peers.block_len)
    return pair


def has_opaque_row(row_offsets: Sequence[int], kv_block_lens: Sequence[int], block_lens: Sequence[int]) -> bool:
    """Whether some region is a whole packed row, whose layers have lost their names but for the first."""
    if not row_offsets or not len(row_offsets) == len(kv_block_lens) == len(block_lens):
        return False
    return any(
        offset == 0 and length == stride
        for offset, length, stride in zip(row_offsets, kv_block_lens, block_lens, strict=True)
    )


# -- lengths ----------------------------------------------------------------------------------------------


def length_problem(
    pairs: Sequence[RegionPair], local_tp_size: int, remote_tp_size: int, *, num_kv_heads: int | None, replicated: bool
) -> str | None:
    """Why blocks of these lengths cannot hold the same heads; None: they do.

    `num_kv_heads` None: it says nothing about the split (MLA, state models). `replicated`: each producer rank has all.
    """
    if num_kv_heads is not None:
        local_tp_size, remote_tp_size = min(local_tp_size, num_kv_heads), min(remote_tp_size, num_kv_heads)
    elif replicated:
        return None
    ratio = tp_ratio(local_tp_size, remote_tp_size)
    for index, (own, peers) in enumerate(pairs):
        ours, theirs = own.kv_block_len, peers.kv_block_len
        if ratio == 1:
            if ours != theirs:
                return (
                    "Mooncake KV region length mismatch for homogeneous TP at "
                    f"region {index}: local={ours}, remote={theirs}."
                )
        elif ratio > 0:
            if theirs != ours * ratio:
                return (
                    "Mooncake destination KV region length does not match the producer TP ratio at region "
                    f"{index}: local={ours}, remote={theirs}, tp_ratio={ratio}."
                )
        elif ours != theirs * -ratio:
            return (
                "Mooncake source KV region length does not match the consumer TP ratio at region "
                f"{index}: local={ours}, remote={theirs}, tp_ratio={ratio}."
            )
    return None
