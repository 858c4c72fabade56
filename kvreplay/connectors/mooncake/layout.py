"""Registered KV memory: what a consumer tells a producer about its regions, and whether the two fit."""

from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from kvreplay.connectors.mooncake.config import MAX_PEER_LAYOUTS
from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.rng import stable_hash

_WORD_BYTES = 8
_FIRST_BASE_ADDR = 0x6100_0000_0000
_REGION_SPACING = 1 << 36


@dataclass(frozen=True, slots=True)
class Region:
    """One registered tensor. `kv_block_len` of a block's `block_len` bytes are payload."""

    layer_name: str
    layer_index: int
    group_index: int
    base_addr: int
    block_len: int
    kv_block_len: int
    row_offset: int = -1


@dataclass(frozen=True, slots=True)
class KVLayout:
    """One rank's registered regions, and the id of their registration: odd, never the same for two of them."""

    regions: tuple[Region, ...]
    layout_id: int

    def totals(self, num_groups: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Per KV cache group: payload bytes of a block over all regions, and the number of regions."""
        of_group = [
            [region.kv_block_len for region in self.regions if region.group_index == group]
            for group in range(num_groups)
        ]
        return tuple(map(sum, of_group)), tuple(map(len, of_group))

    def describe(self, metadata: MooncakeXferMetadata) -> None:
        """Write the whole layout into a pull."""
        regions = self.regions
        metadata.kv_caches_base_addr = [region.base_addr for region in regions]
        metadata.block_lens = [region.block_len for region in regions]
        metadata.kv_block_lens = [region.kv_block_len for region in regions]
        metadata.registered_layer_names = [region.layer_name for region in regions]
        metadata.registered_layer_indices = [region.layer_index for region in regions]
        metadata.registered_group_indices = [region.group_index for region in regions]
        metadata.registered_shared_group_ids = [[region.group_index] for region in regions]
        metadata.registered_row_offsets = [region.row_offset for region in regions]


def layout_of(groups: Sequence[KVCacheGroupSpec], engine_id: str, rank: int) -> KVLayout:
    """One region per KV cache group, which stands for all layers of the group."""
    regions = tuple(
        Region(
            layer_name=f"model.layers.{index}.attn",
            layer_index=index,
            group_index=index,
            base_addr=_FIRST_BASE_ADDR + index * _REGION_SPACING,
            block_len=page_bytes(group),
            kv_block_len=page_bytes(group),
        )
        for index, group in enumerate(groups)
    )
    return KVLayout(regions, stable_hash("kv layout", engine_id, rank) >> 1 | 1)


def page_bytes(group: KVCacheGroupSpec) -> int:
    return group.page_bytes or group.block_size * _WORD_BYTES


def misfit(local: Sequence[Region], remote: MooncakeXferMetadata) -> str | None:
    """Why a producer with these regions cannot write to that consumer, in vLLM's words; None: it can.

    For equal parallel sizes: regions are matched by layer name, their payloads must have equal lengths.
    """
    fields = zip(
        remote.registered_layer_names,
        remote.registered_layer_indices or [0] * len(remote.registered_layer_names),
        remote.registered_group_indices or [0] * len(remote.registered_layer_names),
        remote.kv_block_lens,
        strict=False,
    )
    by_occurrence: dict[tuple[str, int], tuple[int, int, int]] = {}
    for name, layer_index, group_index, kv_block_len in fields:
        occurrence = sum(known == name for known, _ in by_occurrence)
        by_occurrence[name, occurrence] = (layer_index, group_index, kv_block_len)
    seen: dict[str, int] = {}
    lengths: list[tuple[int, int]] = []
    for region in local:
        name = region.layer_name
        occurrence = seen.get(name, 0)
        seen[name] = occurrence + 1
        match = by_occurrence.get((name, occurrence))
        if match is None:
            return (
                "Mooncake producer registered layer has no matching consumer occurrence: "
                f"{name} occurrence {occurrence}."
            )
        for what, own, peers in (("layer", region.layer_index, match[0]), ("group", region.group_index, match[1])):
            if own != peers:
                return f"Mooncake registered {what} index mismatch for {name}: producer={own}, consumer={peers}."
        lengths.append((region.kv_block_len, match[2]))
    for index, (own, peers) in enumerate(lengths):
        if own != peers:
            return (
                f"Mooncake KV region length mismatch for homogeneous TP at region {index}: local={own}, remote={peers}."
            )
    return None


class PeerLayouts:
    """Which consumers' layouts a producer knows."""

    def __init__(self, limit: int = MAX_PEER_LAYOUTS) -> None:
        self._limit = limit
        self._known: OrderedDict[Hashable, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._known)

    def knows(self, pull: MooncakeXferMetadata) -> bool:
        key = _peer_key(pull)
        if key not in self._known:
            return False
        self._known.move_to_end(key)
        return True

    def remember(self, pull: MooncakeXferMetadata) -> None:
        if pull.layout_id:
            key = _peer_key(pull)
            self._known[key] = None
            self._known.move_to_end(key)
            while len(self._known) > self._limit:
                self._known.popitem(last=False)

    def forget(self) -> None:
        self._known.clear()


def _peer_key(pull: MooncakeXferMetadata) -> Hashable:
    return (
        pull.remote_hostname,
        pull.remote_port,
        pull.remote_tp_rank,
        pull.remote_pp_size,
        pull.remote_tp_size,
        pull.layout_id,
    )
