"""Rows about engine writes."""

from bisect import bisect_right
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import accumulate
from random import Random
from typing import Final

from kvreplay.connectors.mooncake.catalogue.common import (
    FAILS_OR_RECOMPUTES,
    NEEDS,
)
from kvreplay.connectors.mooncake.plan import WriteSegment
from kvreplay.connectors.mooncake.structs import (
    WriteData,
)
from kvreplay.ids import NS_PER_S
from kvreplay.sim.catalogue import DURATION, SHARE, FaultRow, Setting, Settings
from kvreplay.sim.envelope import (
    WRITE_DATA,
    Corruption,
    Delivery,
    Envelope,
)


def _may_hit(segment: WriteSegment, settings: Settings) -> bool:
    """Whether a fault with these keys may hit the blocks of this segment."""
    request, group = settings["request"], settings["group"]
    return (group is None or segment.group == group) and (request is None or fnmatchcase(segment.request_id, request))


def _has_candidates(envelope: Envelope, settings: Settings) -> bool:
    data: WriteData = envelope.payload
    return any(len(segment.block_ids) and _may_hit(segment, settings) for segment in data.segments)


def _hit_blocks(envelope: Envelope, settings: Settings, draw: int) -> list[int]:
    """The numbers of the blocks of the write that are hit."""
    data: WriteData = envelope.payload
    candidates: list[int] = []
    start = 0
    for segment in data.segments:
        end = start + len(segment.block_ids)
        if _may_hit(segment, settings):
            candidates.extend(range(start, end))
        start = end
    count = min(settings.get("blocks", 1), len(candidates))
    return sorted(Random(draw).sample(candidates, count))


def _owners(envelope: Envelope, numbers: list[int]) -> tuple[str, ...]:
    """The requests whose blocks these are."""
    data: WriteData = envelope.payload
    ends = list(accumulate(len(segment.block_ids) for segment in data.segments))
    return tuple(dict.fromkeys(data.segments[bisect_right(ends, number)].request_id for number in numbers))


def _corrupt_owners(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    return _owners(envelope, _hit_blocks(envelope, settings, draw))


def _corrupt(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    corruptions = tuple(
        Corruption(draw=draw, fault_spec="", block=number) for number in _hit_blocks(envelope, settings, draw)
    )
    return [Delivery(replace(envelope, corruptions=(*envelope.corruptions, *corruptions)))]


def _num_written(data: WriteData, settings: Settings) -> int:
    """At least one block is missing."""
    return min(int(settings["share"] * data.num_blocks), data.num_blocks - 1)


def _unwritten_owners(envelope: Envelope, settings: Settings, draw: int) -> tuple[str, ...]:
    data: WriteData = envelope.payload
    return _owners(envelope, list(range(_num_written(data, settings), data.num_blocks)))


def _write_part(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    data: WriteData = envelope.payload
    left = num_written = _num_written(data, settings)
    segments: list[WriteSegment] = []
    for segment in data.segments:
        count = min(left, len(segment.block_ids))
        segments.append(
            segment._replace(source_block_ids=segment.source_block_ids[:count], block_ids=segment.block_ids[:count])
        )
        left -= count
    written = replace(data, segments=tuple(segments), num_blocks=num_written)
    return [Delivery(replace(envelope, payload=written))]


def _return_failure(envelope: Envelope, settings: Settings, draw: int) -> list[Delivery]:
    return [Delivery(replace(envelope, write_result=settings["ret"]))]


WRITES: Final = (
    FaultRow(
        name="slow",
        models="a congested link: the engine write takes longer (batch_transfer_sync_write)",
        verb="delay",
        target=WRITE_DATA,
        survives="the load is late, nothing else; past the engine's deadline as mooncake.engine-ret",
        settings={"delay": Setting(default=10 * NS_PER_S, unit=DURATION, doc="how much longer it takes")},
        short_name=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="corrupt",
        models="a destination block has other bytes than were sent, the status is OK: no checksum on the wire",
        verb="corrupt",
        target=WRITE_DATA,
        survives="no token is computed from it; only profile ideal can tell",
        transform=_corrupt,
        victims=_corrupt_owners,
        selects=_has_candidates,
        short_name=True,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-ret",
        models="the engine write fails (batch_transfer_sync_write returns -1)",
        verb="replace",
        target=WRITE_DATA,
        survives=f"{FAILS_OR_RECOMPUTES}; the producer's blocks expire",
        settings={"ret": Setting(default=-1, minimum=-1000, doc="what it returns; 0 is success")},
        transform=_return_failure,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-slow",
        models="the engine write outlasts its deadline, 30 s and 1 ns per byte: -1, and the bytes land late",
        verb="delay",
        target=WRITE_DATA,
        survives="late bytes never reach a block that has another owner by then",
        settings={"delay": Setting(default=60 * NS_PER_S, unit=DURATION, doc="how much longer it takes")},
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-hang",
        models="the engine write never ends by itself",
        verb="drop",
        target=WRITE_DATA,
        survives=f"after the engine's deadline {FAILS_OR_RECOMPUTES}",
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-corrupt",
        models="bytes of several destination blocks change, the write returns 0",
        verb="corrupt",
        target=WRITE_DATA,
        survives="no token is computed from them; only profile ideal can tell",
        settings={"blocks": Setting(default=1, unit="blocks", minimum=1, doc="how many")},
        transform=_corrupt,
        victims=_corrupt_owners,
        selects=_has_candidates,
        needs=NEEDS,
    ),
    FaultRow(
        name="mooncake.engine-partial",
        models="only some descriptors of the write are carried out, it returns 0",
        verb="partial",
        target=WRITE_DATA,
        survives="no token is computed from what was never written; only profile ideal can tell",
        settings={"share": Setting(default=0.5, unit=SHARE, doc="the blocks that are written, from the first on")},
        transform=_write_part,
        victims=_unwritten_owners,
        needs=NEEDS,
    ),
)
