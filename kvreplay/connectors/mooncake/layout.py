"""A rank's registered layout, and what a producer makes of its consumers' layouts."""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.config import MAX_PEER_LAYOUTS
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.plan import BrokenPlanError, HeadLayout, TransferPlan, make_plan
from kvreplay.connectors.mooncake.ranks import Ranks, tp_ratio
from kvreplay.connectors.mooncake.regions import (
    NOT_A_ROW,
    MisfitError,
    Region,
    RegionPair,
    align,
    coalesce,
    has_opaque_row,
    length_problem,
)
from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata
from kvreplay.sim.recent import Recent

_T = TypeVar("_T")

_MAX_PREPARED: Final = 1024
"""Layouts whose comparison with the own one is remembered."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One rank's registered regions, and the id of their registration: odd, never the same for two of them."""

    regions: tuple[Region, ...]
    layout_id: int
    has_opaque_rows: bool = False
    """Some region is a packed row that could not be cut into its layers."""

    def block_bytes(self, num_groups: int) -> list[int]:
        """Payload of a block of the memory, over all regions, per KV cache group."""
        return [
            sum(region.kv_block_len for region in self.regions if group in region.groups) for group in range(num_groups)
        ]

    def describe(self, metadata: MooncakeXferMetadata) -> None:
        """Write the whole layout into a pull."""
        regions = self.regions
        metadata.kv_caches_base_addr = [region.base_addr for region in regions]
        metadata.block_lens = [region.block_len for region in regions]
        metadata.kv_block_lens = [region.kv_block_len for region in regions]
        metadata.registered_layer_names = [region.layer_name for region in regions]
        metadata.registered_layer_indices = [region.layer_index for region in regions]
        metadata.registered_group_indices = [region.group_index for region in regions]
        metadata.registered_shared_group_ids = [
            list(region.shared_group_ids or (region.group_index,)) for region in regions
        ]
        metadata.registered_row_offsets = [region.row_offset for region in regions]


class LayoutMissError(Exception):
    """The pull refers to a layout that the producer does not know (any more)."""


@dataclass(slots=True, eq=False)
class _Prepared:
    """The outcome of comparing a consumer's layout with the own one."""

    pairs: list[RegionPair]
    misfit: str | None = None
    plan: TransferPlan | None = None


class LayoutMatcher:
    """A producer rank's side of layouts: finds the plan for a pull, and remembers what it has found.

    Pulls without a layout mean the one sent before. It is known by peer and id; the outcome of the comparison is kept
    by content, so that a layout that was forgotten and sent again is not compared again.
    """

    def __init__(
        self,
        layout: KVLayout,
        ranks: Ranks,
        heads: HeadLayout,
        log_line: LogSink | None,
        *,
        limit: int = MAX_PEER_LAYOUTS,
    ) -> None:
        self._layout = layout
        self._ranks = ranks
        self._heads = heads
        self._log = log_line
        self._group_of_layer = {region.layer_name: region.group_index for region in layout.regions}
        self._by_peer: Recent[Hashable, _Prepared] = Recent(limit)
        self._prepared: Recent[Hashable, _Prepared] = Recent(_MAX_PREPARED)

    def __len__(self) -> int:
        return len(self._by_peer)

    def forget(self) -> None:
        self._by_peer.clear()

    def plan_for(self, pull: MooncakeXferMetadata) -> TransferPlan:
        """Raises MisfitError, LayoutMissError, and BrokenPlanError or ValueError where an assertion of vLLM's fails."""
        if pull.layout_id and not pull.kv_caches_base_addr:
            prepared = self._known(pull)
        else:
            prepared = self._prepare(pull)
        if prepared.plan is None:
            prepared.plan = self._make_plan(prepared, pull)
        return prepared.plan

    def refuses_stages(self, pull: MooncakeXferMetadata) -> bool:
        """Whether pipeline stages differ and a packed row hides which layers are in it."""
        return pull.remote_pp_size != self._ranks.pp_size and (
            self._layout.has_opaque_rows
            or has_opaque_row(pull.registered_row_offsets, pull.kv_block_lens, pull.block_lens)
        )

    def _known(self, pull: MooncakeXferMetadata) -> _Prepared:
        key = _peer_key(pull)
        prepared = self._by_peer.get(key)
        if prepared is None:
            raise LayoutMissError(
                f"Mooncake KV layout {pull.layout_id:#x} from {pull.remote_hostname}:{pull.remote_port} is not cached."
            )
        self._by_peer[key] = prepared  # used again, so kept as long as a new one
        return prepared

    def _prepare(self, pull: MooncakeXferMetadata) -> _Prepared:
        key = _content_key(pull)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._compare(pull)
        if prepared.misfit is not None:
            raise MisfitError(prepared.misfit)
        if pull.layout_id:
            self._by_peer[_peer_key(pull)] = prepared
        return prepared

    def _compare(self, pull: MooncakeXferMetadata) -> _Prepared:
        local, remote = self._layout.regions, regions_of(pull, self._group_of_layer)
        try:
            pairs = align(local, remote, allow_partial_layers=pull.remote_pp_size != self._ranks.pp_size)
        except MisfitError as misfit:
            return _Prepared([], str(misfit))
        tp_size = self._ranks.tp_size
        if tp_ratio(tp_size, pull.remote_tp_size) == 1 or self._heads.is_replicated(tp_size):
            num_aligned = len(pairs)
            pairs = coalesce(pairs, promote_full_row=len(pairs) == len(local) == len(remote))
            if self._log is not None:
                self._log(log.SENDER, log.INFO, log.COALESCED, num_aligned, len(pairs))
        return _Prepared(pairs)

    def _make_plan(self, prepared: _Prepared, pull: MooncakeXferMetadata) -> TransferPlan:
        ranks, heads = self._ranks, self._heads
        problem = length_problem(
            prepared.pairs,
            ranks.tp_size,
            pull.remote_tp_size,
            num_kv_heads=heads.split_heads,
            replicated=heads.is_replicated(ranks.tp_size),
        )
        if problem is not None:
            raise MisfitError(problem)
        return make_plan(prepared.pairs, ranks, pull.remote_tp_rank, pull.remote_tp_size, heads)


def regions_of(pull: MooncakeXferMetadata, group_of_layer: Mapping[str, int]) -> list[Region]:
    """The consumer's regions. What an older consumer does not say is filled in. Raises BrokenPlanError."""
    names = pull.registered_layer_names
    num_regions = len(names)
    lengths = {
        "base_addrs": len(pull.kv_caches_base_addr),
        "block_lens": len(pull.block_lens),
        "kv_block_lens": len(pull.kv_block_lens),
        "layer_names": num_regions,
        "layer_indices": len(pull.registered_layer_indices),
    }
    if set(lengths.values()) != {num_regions}:
        found = ", ".join(f"{name}={length}" for name, length in lengths.items())
        raise BrokenPlanError(f"Mooncake transfer regions require matching metadata lengths, got {found}.")
    groups = pull.registered_group_indices or [group_of_layer.get(name, 0) for name in names]
    if len(groups) != num_regions:
        raise BrokenPlanError(
            "Mooncake transfer regions require matching group metadata lengths, "
            f"got group_indices={len(groups)}, layer_names={num_regions}."
        )
    shared = _or_default(pull.registered_shared_group_ids, num_regions, [])
    row_offsets = _or_default(pull.registered_row_offsets, num_regions, NOT_A_ROW)
    return [
        Region(
            layer_name=name,
            layer_index=pull.registered_layer_indices[index],
            base_addr=pull.kv_caches_base_addr[index],
            block_len=pull.block_lens[index],
            kv_block_len=pull.kv_block_lens[index],
            group_index=groups[index],
            shared_group_ids=tuple(shared[index]),
            row_offset=row_offsets[index],
        )
        for index, name in enumerate(names)
    ]


def _or_default(values: Sequence[_T], length: int, default: _T) -> Sequence[_T]:
    return values if len(values) == length else [default] * length


def _peer_key(pull: MooncakeXferMetadata) -> Hashable:
    return (
        pull.remote_hostname,
        pull.remote_port,
        pull.remote_tp_rank,
        pull.remote_pp_size,
        pull.remote_tp_size,
        pull.layout_id,
    )


def _content_key(pull: MooncakeXferMetadata) -> Hashable:
    return (
        pull.remote_hostname,
        pull.remote_port,
        pull.remote_tp_size,
        pull.remote_tp_rank,
        pull.remote_pp_size,
        tuple(pull.kv_caches_base_addr),
        tuple(pull.block_lens),
        tuple(pull.kv_block_lens),
        tuple(pull.registered_layer_names),
        tuple(pull.registered_layer_indices),
        tuple(pull.registered_group_indices),
        tuple(map(tuple, pull.registered_shared_group_ids)),
        tuple(pull.registered_row_offsets),
    )
