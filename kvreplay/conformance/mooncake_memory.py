"""KV tensors at fixed addresses, byte for byte."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvreplay.conformance.mooncake_scenario import NUM_KV_HEADS, SideSpec
from kvreplay.conformance.vector import Json
from kvreplay.connectors.mooncake.layout import KVLayout
from kvreplay.connectors.mooncake.memory import Contents, UnregisteredMemoryError
from kvreplay.connectors.mooncake.regions import NOT_A_ROW, Region
from kvreplay.kv.memory import BlockIds, Provenance

_BASES: Final = {"P": 0x6000_0000_0000, "D": 0x6100_0000_0000}
_WORKER_BITS: Final = 32
_LAYER_BITS: Final = 24
_FIRST_LAYOUT_ID: Final = 0x1111_0000_0000_0000
_MANY_RUNS: Final = 6


@dataclass(slots=True)
class Tensor:
    """One layer's blocks: `rows` has a row of bytes for each."""

    name: str
    layer: int
    group: int
    base_addr: int
    rows: NDArray[np.uint8]
    is_row_view: bool

    @property
    def region(self) -> Region:
        block_len = self.rows.shape[1]
        return Region(
            layer_name=self.name,
            layer_index=self.layer,
            base_addr=self.base_addr,
            block_len=block_len,
            kv_block_len=block_len,
            group_index=self.group,
            shared_group_ids=(self.group,),
            row_offset=0 if self.is_row_view else NOT_A_ROW,
        )


class ByteMemory:
    """A rank's tensors (`connectors.mooncake.memory.RankMemory`). Addresses mean bytes, whoever names them."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def read(self, region: Region, block_ids: BlockIds, offset: int, length: int) -> Contents:
        rows = np.empty((len(block_ids), length), np.uint8)
        for place, address in enumerate(_addresses(region, block_ids, offset)):
            rows[place] = self._bytes_at(address, length)
        return rows

    def write(
        self,
        region: Region,
        block_ids: BlockIds,
        offset: int,
        length: int,
        contents: Contents,
        *,
        provenance: Provenance | None,
    ) -> None:
        for place, address in enumerate(_addresses(region, block_ids, offset)):
            self._bytes_at(address, length)[:] = contents[place]

    def mark_corrupted(self, region: Region, block_id: int, provenance: Provenance) -> None:
        pass

    def has(self, address: int) -> bool:
        return any(0 <= address - tensor.base_addr < tensor.rows.size for tensor in self.tensors)

    def poke(self, address: int, value: int) -> None:
        """Change one byte."""
        self._bytes_at(address, 1)[0] = value & 0xFF

    def _bytes_at(self, address: int, length: int) -> NDArray[np.uint8]:
        for tensor in self.tensors:
            start = address - tensor.base_addr
            if start >= 0 and start + length <= tensor.rows.size:
                return tensor.rows.reshape(-1)[start : start + length]
        raise UnregisteredMemoryError(hex(address))

    def runs(self) -> dict[str, Json]:
        """Layer → block → run lengths of its byte values; blocks of zeros are left out."""
        layers: dict[str, Json] = {}
        for tensor in self.tensors:
            for block, row in enumerate(tensor.rows):
                if row.any():
                    runs = [[value, len(list(same))] for value, same in groupby(row.tolist())]
                    shown = runs if len(runs) <= _MANY_RUNS else f"{len(runs)} runs"
                    layers.setdefault(f"l{tensor.layer}", {})[str(block)] = shown
        return layers


def _addresses(region: Region, block_ids: BlockIds, offset: int) -> Iterator[int]:
    return (region.base_addr + int(block_id) * region.block_len + offset for block_id in block_ids)


def page_bytes(spec: SideSpec) -> list[int]:
    """Of a block of one layer, per KV cache group."""
    heads = max(NUM_KV_HEADS // spec.tp, 1)
    return [group.page_bytes(spec.block_size, heads) for group in spec.groups]


def layer_names(spec: SideSpec, group: int) -> list[str]:
    described = spec.groups[group]
    layers = described.layers if described.layers is not None else [group]
    return [f"model.layers.{layer}.{described.name}" for layer in layers]


def make_tensors(kind: str, spec: SideSpec, worker: int, pp_rank: int) -> list[Tensor]:
    """The tensors of one worker: of its pipeline stage, a producer's filled with a value per block."""
    named = [(name, group) for group in range(len(spec.groups)) for name in layer_names(spec, group)]
    per_stage = -(-len(named) // spec.pp)
    pages = page_bytes(spec)
    tensors: list[Tensor] = []
    for name, group in named[pp_rank * per_stage : (pp_rank + 1) * per_stage]:
        kind_of_group = spec.groups[group].type
        # States and rows of latents are not cut into the kernel's blocks.
        ratio = spec.kernel_ratio if kind_of_group in ("full", "swa") else 1
        layer = int(name.split(".")[2])
        rows = np.zeros((spec.num_blocks * ratio, pages[group] // ratio), np.uint8)
        if kind == "P":
            rows[:] = (1 + (worker * 120 + layer * 40 + np.arange(len(rows))) % 250).astype(np.uint8)[:, None]
        base_addr = _BASES[kind] + (worker << _WORKER_BITS) + (layer << _LAYER_BITS)
        tensors.append(Tensor(name, layer, group, base_addr, rows, kind_of_group == "mla"))
    return tensors


def layout_of(tensors: list[Tensor], registration: int) -> KVLayout:
    """`registration` numbers the registrations of a run."""
    layout_id = (_FIRST_LAYOUT_ID + 0x100 * registration) | 1
    return KVLayout(tuple(tensor.region for tensor in tensors), layout_id)
