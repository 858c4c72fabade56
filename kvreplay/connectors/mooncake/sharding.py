"""How a replay's KV memory is spread over the ranks of its engines.

Every word of a block belongs to one *share*: a stage's layers, for as many heads as the finest split of any engine puts
on one rank. A rank's rows are whole shares, an engine's rows those of its ranks one after the other: so a part of a
block that never arrived, or arrived in another's place, is seen.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Final

from kvreplay.connectors.mooncake.layout import KVLayout
from kvreplay.connectors.mooncake.memory import Columns
from kvreplay.connectors.mooncake.plan import HeadLayout
from kvreplay.connectors.mooncake.ranks import Ranks, all_ranks
from kvreplay.connectors.mooncake.regions import Region
from kvreplay.kv.block_rows import words_per_block
from kvreplay.kv.specs import KVCacheGroupSpec
from kvreplay.sim.rng import stable_hash

_WORD_BYTES: Final = 8
_FIRST_BASE_ADDR: Final = 0x6100_0000_0000
_RANK_SPACING: Final = 1 << 44
_REGION_SPACING: Final = 1 << 36


@dataclass(frozen=True, slots=True)
class Sharding:
    """The shares of one model, for engines of the given (tensor, pipeline) parallel sizes."""

    heads: HeadLayout = field(default_factory=HeadLayout)
    num_units: int = 1
    """Parts into which heads are cut."""
    num_stages: int = 1
    """Parts into which layers are cut."""

    @classmethod
    def of(cls, heads: HeadLayout, engines: Iterable[tuple[int, int]]) -> "Sharding":
        units, stages = 1, 1
        for tp_size, pp_size in engines:
            most = tp_size if heads.num_kv_heads is None else min(tp_size, heads.num_kv_heads)
            units = lcm(units, 1 if heads.is_mla else most)
            stages = lcm(stages, pp_size)
        return cls(heads, units, stages)

    def units_of(self, ranks: Ranks) -> range:
        """The head units on a rank."""
        if self.heads.is_mla:
            return range(1)
        # Ranks beyond the number of heads hold the same ones as their neighbours.
        per_rank = max(self.num_units // ranks.tp_size, 1)
        first = ranks.tp_rank * self.num_units // ranks.tp_size
        return range(first, first + per_rank)

    def stages_of(self, ranks: Ranks) -> range:
        per_rank = self.num_stages // ranks.pp_size
        return range(ranks.pp_rank * per_rank, (ranks.pp_rank + 1) * per_rank)

    def shares_of(self, ranks: Ranks) -> list[int]:
        """The shares of a rank's rows, in order."""
        return [stage * self.num_units + unit for stage in self.stages_of(ranks) for unit in self.units_of(ranks)]

    def row_shares(self, tp_size: int, pp_size: int) -> tuple[int, ...]:
        """The shares of an engine's rows, in order: rank by rank."""
        return tuple(share for ranks in all_ranks(tp_size, pp_size) for share in self.shares_of(ranks))

    def by_share(self, of_ranks: Sequence[int], tp_size: int, pp_size: int) -> list[int]:
        """What each rank has, for each of `row_shares`."""
        own = zip(all_ranks(tp_size, pp_size), of_ranks, strict=True)
        return [value for ranks, value in own for _ in self.shares_of(ranks)]

    def layout(self, groups: Sequence[KVCacheGroupSpec], engine_id: str, ranks: Ranks) -> KVLayout:
        """One region per KV cache group and stage, which stands for all of its layers."""
        regions = []
        for group_index, group in enumerate(groups):
            chunk = max(page_bytes(group) // (self.num_units * self.num_stages), 1)
            block_len = chunk * len(self.units_of(ranks))
            for stage in self.stages_of(ranks):
                layer = group_index * self.num_stages + stage
                regions.append(
                    Region(
                        layer_name=f"model.layers.{layer}.attn",
                        layer_index=layer,
                        base_addr=_base_addr(ranks, layer),
                        block_len=block_len,
                        kv_block_len=block_len,
                        group_index=group_index,
                        shared_group_ids=(group_index,),
                    )
                )
        return KVLayout(tuple(regions), stable_hash("kv layout", engine_id, ranks.rank) >> 1 | 1)

    def columns(self, groups: Sequence[KVCacheGroupSpec], ranks: Ranks) -> dict[int, Columns] | None:
        """Where a rank's regions are in its engine's rows, by address. None: regions are rows, and move as such."""
        if ranks.tp_size == ranks.pp_size == self.num_units == self.num_stages == 1:
            return None
        widths = [len(self.units_of(ranks)) * words_per_block(group) for group in groups]
        stages = self.stages_of(ranks)
        first = ranks.rank * len(stages)
        return {
            _base_addr(ranks, group * self.num_stages + stage): Columns((first + place) * width, width)
            for group, width in enumerate(widths)
            for place, stage in enumerate(stages)
        }


def _base_addr(ranks: Ranks, layer: int) -> int:
    return _FIRST_BASE_ADDR + ranks.rank * _RANK_SPACING + layer * _REGION_SPACING


def page_bytes(group: KVCacheGroupSpec) -> int:
    return group.page_bytes or group.block_size * _WORD_BYTES
