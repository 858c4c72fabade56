"""An engine write as three frames of a socket: what it is, its descriptors, and the bytes.

The bytes are the source's at the moment of sending. A frame may come from anybody: what does not fit the memory that
it means is refused as a whole, before anything of it lands.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from kvreplay.connectors.mooncake.memory import Contents, RankMemory, UnregisteredMemoryError
from kvreplay.connectors.mooncake.plan import Piece, RegionCopy, Slice, TransferPlan, WriteSegment
from kvreplay.connectors.mooncake.regions import Region
from kvreplay.connectors.mooncake.structs import WriteData, WriteDone
from kvreplay.kv.memory import BlockIds
from kvreplay.sim.envelope import WRITE_DATA, Envelope

_NUM_FRAMES: Final = 3


@dataclass(frozen=True, slots=True)
class TargetMemory:
    """What a rank has registered with its transfer engine."""

    contents: RankMemory
    regions: tuple[Region, ...]
    num_blocks: int


class FrameError(ValueError):
    """Frames that are no write, or one that does not fit the memory that it means."""


class _Segment(msgspec.Struct, array_like=True):
    request_id: str
    transfer_id: str
    group: int
    source_block_ids: list[int]
    block_ids: list[int]


class WriteHeader(msgspec.Struct, array_like=True):
    """What one engine call is about. `copies`: own region, consumer's region, and the part of each block."""

    destination: str
    source: str
    session: str
    pull: str
    attempt: int
    write_id: int
    num_blocks: int
    size_bytes: int
    segments: list[_Segment]
    copies: list[tuple[Region, Region, tuple[int, int, int]]]
    widths: list[int]
    """Words per block, of each copy."""
    owed: list[str]
    request_ids: list[str]
    transfer_ids: list[str]
    conversation: str


class DoneFrame(msgspec.Struct, array_like=True):
    """The end of an engine call, for the producer that made it."""

    destination: str
    write_id: int
    ret: int
    raised: str | None


_encoder = msgspec.msgpack.Encoder()
_headers = msgspec.msgpack.Decoder(WriteHeader)
_endings = msgspec.msgpack.Decoder(DoneFrame)


def encode_write(envelope: Envelope) -> list[bytes] | None:
    """None: the producer has nothing to read any more."""
    data: WriteData = envelope.payload
    widths = dict.fromkeys(range(len(data.plan.copies)), 0)
    places = {id(copy): place for place, copy in enumerate(data.plan.copies)}
    parts: list[bytes] = []
    for _, piece in data.plan.pieces(data.segments):
        contents = data.read(piece)
        if contents is None:
            return None
        widths[places[id(piece.copy)]] = contents.shape[1]
        parts.append(np.ascontiguousarray(contents, np.uint64).tobytes())
    descriptors = [piece.descriptor for _, piece in data.plan.descriptors(data.segments)]
    header = WriteHeader(
        destination=envelope.destination,
        source=envelope.source,
        session=data.session,
        pull=data.pull,
        attempt=data.attempt,
        write_id=data.write_id,
        num_blocks=data.num_blocks,
        size_bytes=envelope.size_bytes,
        segments=[
            _Segment(request_id, transfer_id, group, _plain(sources), _plain(targets))
            for request_id, transfer_id, group, sources, targets in data.segments
        ],
        copies=[(copy.local, copy.remote, (copy.part[0], copy.part[1], copy.part[2])) for copy in data.plan.copies],
        widths=list(widths.values()),
        owed=list(data.owed),
        request_ids=list(envelope.request_ids),
        transfer_ids=list(envelope.transfer_ids),
        conversation=envelope.conversation,
    )
    return [_encoder.encode(header), np.array(descriptors, "<i8").reshape(-1, 3).tobytes(), b"".join(parts)]


def _plain(block_ids: BlockIds) -> list[int]:
    return [int(block_id) for block_id in block_ids]


def decode_write(frames: Sequence[bytes], target: TargetMemory | None) -> tuple[WriteHeader, Envelope]:
    """The write, and the envelope in which its consumer takes it. Raises FrameError. `target` None: nobody's memory."""
    if len(frames) != _NUM_FRAMES or target is None:
        raise FrameError(f"{len(frames)} frames")
    header_frame, descriptor_frame, data_frame = frames
    try:
        header = _headers.decode(header_frame)
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error
    copies = tuple(RegionCopy(own, peers, Slice(*part)) for own, peers, part in header.copies)
    _check_copies(header, copies, target)
    plan = TransferPlan(copies)
    segments = tuple(
        WriteSegment(item.request_id, item.transfer_id, item.group, _ids(item.source_block_ids), _ids(item.block_ids))
        for item in header.segments
    )
    _check_segments(segments, plan, target.num_blocks)
    if len(descriptor_frame) != 24 * sum(1 for _ in plan.descriptors(segments)):
        raise FrameError("descriptors do not go with the header")
    data = WriteData(
        session=header.session,
        pull=header.pull,
        attempt=header.attempt,
        write_id=header.write_id,
        segments=segments,
        num_blocks=sum(len(segment.block_ids) for segment in segments),
        read=_Received(plan, segments, header.widths, data_frame).read,
        plan=plan,
        owed=tuple(header.owed),
    )
    envelope = Envelope(
        kind=WRITE_DATA,
        source=header.source,
        destination=header.destination,
        payload=data,
        request_ids=tuple(header.request_ids),
        transfer_ids=tuple(header.transfer_ids),
        conversation=header.conversation,
        attempt=header.attempt,
        size_bytes=header.size_bytes,
    )
    return header, envelope


def _ids(block_ids: list[int]) -> NDArray[np.int64]:
    return np.array(block_ids, np.int64)


def _check_copies(header: WriteHeader, copies: Sequence[RegionCopy], target: TargetMemory) -> None:
    if len(header.widths) != len(copies):
        raise FrameError("widths do not go with the copies")
    registered = {region.base_addr: region for region in target.regions}
    groups = {segment.group for segment in header.segments}
    for copy, width in zip(copies, header.widths, strict=True):
        own, part = registered.get(copy.remote.base_addr), copy.part
        if own is None or own.group_index != copy.remote.group_index or own.kv_block_len != copy.remote.kv_block_len:
            raise FrameError(f"no region at {copy.remote.base_addr:#x}")
        if min(part) < 0 or not copy.is_sound or copy.local.group_index != own.group_index:
            raise FrameError("a part outside its block")
        if not part.length or groups.isdisjoint(copy.local.groups):
            continue  # nothing of it is sent
        try:
            block = np.zeros(1, np.int64)
            expected = target.contents.read(copy.remote, block, part.target_offset, part.length).shape[1]
        except (UnregisteredMemoryError, AssertionError) as error:
            raise FrameError(str(error)) from error
        if width != expected:
            raise FrameError(f"{width} words per block, expected {expected}")


def _check_segments(segments: Sequence[WriteSegment], plan: TransferPlan, num_blocks: int) -> None:
    for segment in segments:
        if segment.group not in plan.by_group or len(segment.source_block_ids) != len(segment.block_ids):
            raise FrameError("a segment that no copy serves")
        ids = np.asarray(segment.block_ids)
        if len(ids) and (ids.min() < 0 or ids.max() >= num_blocks):
            raise FrameError("a block outside the pool")


class _Received:
    """The bytes of one write, by copy and source block."""

    def __init__(
        self, plan: TransferPlan, segments: Sequence[WriteSegment], widths: Sequence[int], data: bytes
    ) -> None:
        width_of = {id(copy): width for copy, width in zip(plan.copies, widths, strict=True)}
        self._rows: dict[tuple[int, int], NDArray[np.uint64]] = {}
        self._width_of = width_of
        start = 0
        for _, piece in plan.pieces(segments):
            width = width_of[id(piece.copy)]
            end = start + 8 * width * len(piece.block_ids)
            if end > len(data):
                raise FrameError("fewer bytes than the header says")
            rows = np.frombuffer(data[start:end], np.uint64).reshape(len(piece.block_ids), width)
            for block_id, row in zip(piece.source_block_ids, rows, strict=True):
                self._rows[id(piece.copy), int(block_id)] = row
            start = end
        if start != len(data):
            raise FrameError("more bytes than the header says")

    def read(self, piece: Piece) -> Contents:
        rows = [self._rows[id(piece.copy), int(block_id)] for block_id in piece.source_block_ids]
        return np.array(rows, np.uint64).reshape(len(rows), self._width_of[id(piece.copy)])


def encode_done(done: WriteDone, destination: str) -> bytes:
    return _encoder.encode(DoneFrame(destination, done.write_id, done.ret, done.raised))


def decode_done(frames: Sequence[bytes]) -> tuple[str, WriteDone]:
    """(the producer's address, the end). Raises FrameError."""
    if len(frames) != 1:
        raise FrameError(f"{len(frames)} frames")
    try:
        ending = _endings.decode(frames[0])
    except msgspec.MsgspecError as error:
        raise FrameError(str(error)) from error
    return ending.destination, WriteDone(ending.write_id, ending.ret, ending.raised)
