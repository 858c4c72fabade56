"""What the two halves of the Mooncake connector say to each other, and to their bootstrap server.

Wire structures have vLLM's names, fields and bytes (msgpack maps, default values omitted). Within one run they
travel as structs; over a socket, or where a fault has made bytes of them, they are encoded.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import islice
from typing import Final

import msgspec

from kvreplay.connectors.mooncake.coverage import Coverage
from kvreplay.connectors.mooncake.memory import Contents
from kvreplay.connectors.mooncake.plan import NOTHING, Piece, TransferPlan, WriteSegment

STRAY_FRAMES: Final = "stray.frames"
"""Kind of a message to a producer's socket that is no pull; its payload is its frames, without the identity."""
FIRST_TOKEN_STOPS: Final = "_first_token_stops"
"""In a request's `kv_transfer_params`: its first token is a stop token. Only a fault says so."""
CONNECTION_CLOSED: Final = "connection.closed"
"""Kind of the notice that the peer of an open pull is gone. No fault acts on it; only `pull_wait=bounded` hears it."""


# -- pull and reply ---------------------------------------------------------------------------------------


class MooncakeXferMetadata(msgspec.Struct, omit_defaults=True):
    """A pull: the consumer says where the producer shall write. `remote_*` is the consumer, as the producer sees it.

    `req_blocks`: the consumer's request id → transfer id and destination blocks per KV cache group; no blocks at all
    only release the producer's. An empty layout with a nonzero `layout_id` means "the one you have".
    """

    remote_hostname: str
    remote_port: int
    remote_tp_size: int
    remote_tp_rank: int
    req_blocks: dict[str, tuple[str, Sequence[Sequence[int]]]]
    kv_caches_base_addr: list[int]
    block_lens: list[int]
    kv_block_lens: list[int]
    registered_layer_names: list[str] = msgspec.field(default_factory=list)
    registered_layer_indices: list[int] = msgspec.field(default_factory=list)
    registered_group_indices: list[int] = msgspec.field(default_factory=list)
    registered_shared_group_ids: list[list[int]] = msgspec.field(default_factory=list)
    registered_row_offsets: list[int] = msgspec.field(default_factory=list)
    remote_pp_size: int = 1
    layout_id: int = 0


class MooncakeXferResponseStatus(IntEnum):
    """FINISH and ERROR end a pull, CONTINUE promises more; after LAYOUT_MISS the consumer sends the layout again."""

    FINISH = 0
    CONTINUE = 1
    ERROR = 2
    LAYOUT_MISS = 3


class MooncakeXferResponse(msgspec.Struct, omit_defaults=True):
    """A reply. ERROR means every request of the pull that is not settled yet; the others name theirs."""

    status: MooncakeXferResponseStatus
    ok_reqs: list[str] | None = None
    err_reqs: list[str] | None = None
    err_msg: str | None = None
    layout_id: int = 0


_encoder = msgspec.msgpack.Encoder(enc_hook=list)
_request_decoder = msgspec.msgpack.Decoder(MooncakeXferMetadata)
_response_decoder = msgspec.msgpack.Decoder(MooncakeXferResponse)


def encode(message: MooncakeXferMetadata | MooncakeXferResponse) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> MooncakeXferMetadata:
    """Raises msgspec.MsgspecError, whose text names the field and is what a producer answers."""
    return _request_decoder.decode(frame)


def decode_response(frame: bytes) -> MooncakeXferResponse:
    """Raises msgspec.MsgspecError, whose text names the field and is what a consumer reports."""
    return _response_decoder.decode(frame)


# -- bootstrap --------------------------------------------------------------------------------------------


class RegisterWorkerPayload(msgspec.Struct):
    """Body of POST /register: where one rank of a producer listens."""

    engine_id: str
    dp_rank: int
    tp_rank: int
    pp_rank: int
    addr: str


def encode_registration(payload: RegisterWorkerPayload) -> bytes:
    return msgspec.json.encode(payload)


class EngineEntry(msgspec.Struct):
    """One engine in the body of GET /query, which maps data-parallel ranks to these."""

    engine_id: str
    worker_addr: dict[int, dict[int, str]] = msgspec.field(default_factory=dict)
    """Tensor-parallel rank → pipeline-parallel rank → address."""


def encode_query_body(workers: dict[int, EngineEntry]) -> bytes:
    return msgspec.json.encode(workers)


@dataclass(frozen=True, slots=True)
class BootstrapQuery:
    """An HTTP request to a bootstrap server: GET without a body, POST with one."""

    path: str
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class BootstrapAnswer:
    """Its answer. `error` stands for an answer that never came: the transport failed (`refused`, ...)."""

    status: int = 200
    body: bytes | None = None
    error: str | None = None


# -- engine write -----------------------------------------------------------------------------------------


SourceReader = Callable[[Piece], Contents | None]
"""The producer's bytes of these blocks at this moment; None: the producer has taken the write back, or died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteData:
    """One engine call: every block of one batch of a pull. Sources are read when it is delivered.

    Blocks are numbered through the segments in their order; `Corruption.block` is such a number. A write is not
    atomic: its bytes may land in several deliveries, of which one is also the return of the call.
    """

    session: str
    """`hostname:port` of the memory it means: a consumer that has restarted is another one."""
    pull: str
    """The conversation of the pull that it serves, in its `attempt`."""
    attempt: int
    write_id: int
    """The producer's number of it, which its return carries."""
    segments: tuple[WriteSegment, ...]
    num_blocks: int
    read: SourceReader
    plan: TransferPlan = NOTHING
    lands: slice | None = None
    """Which of its descriptors this delivery carries out; None: all, unless the call's result is forced to fail."""
    returns: bool = True
    """Whether the call returns with this delivery."""
    owed: tuple[str, ...] = ()
    """Requests of the pull that no reply has named yet, those of this write among them."""
    raises: str | None = None
    """What the engine call raises instead of returning."""

    @property
    def num_descriptors(self) -> int:
        return self.plan.num_descriptors(self.segments)

    def landing(self) -> Iterator[tuple[WriteSegment, Piece]]:
        """What this delivery copies, for whom."""
        if self.lands is None:
            return self.plan.pieces(self.segments)
        start, stop, _ = self.lands.indices(self.num_descriptors)
        return islice(self.plan.descriptors(self.segments), start, stop)


@dataclass(frozen=True, slots=True)
class WriteDone:
    """What an engine call returned: 0, or -1 (any other number only by a fault); or what it raised."""

    write_id: int
    ret: int
    raised: str | None = None


# -- metadata: scheduler half → worker half, within one instance ------------------------------------------


@dataclass(slots=True, kw_only=True)
class PullReqMeta:
    """One request to be pulled. The worker keeps its own copy and counts in it."""

    d_req_id: str
    transfer_id: str
    local_block_ids: Sequence[Sequence[int]]
    """Destination blocks, one list per KV cache group; none at all: only release the producer's."""
    remote_engine_id: str
    remote_bootstrap_addr: str
    pull_tasks_count: int = 0
    """Peers that have not settled it yet."""
    failed: bool = False
    """Some peer failed; a success of another does not clear it."""
    coverage: Coverage | None = None
    """What has been received; kept only where that is looked at."""

    def copy(self, coverage: Coverage | None) -> "PullReqMeta":
        """A worker's own, untouched yet."""
        return PullReqMeta(
            d_req_id=self.d_req_id,
            transfer_id=self.transfer_id,
            local_block_ids=self.local_block_ids,
            remote_engine_id=self.remote_engine_id,
            remote_bootstrap_addr=self.remote_bootstrap_addr,
            coverage=coverage,
        )

    @property
    def has_blocks(self) -> bool:
        return any(self.local_block_ids)

    @property
    def has_begun(self) -> bool:
        """Whether a block of it has arrived, where that is looked at."""
        return self.coverage is not None and len(self.coverage.missing_blocks()) < self.num_blocks

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self.local_block_ids))

    @property
    def all_block_ids(self) -> list[int]:
        return [block_id for group in self.local_block_ids for block_id in group]


@dataclass(slots=True)
class MooncakeConnectorMetadata:
    """What the scheduler's half tells the workers in one step."""

    reqs_to_recv: dict[str, dict[str, PullReqMeta]] = field(default_factory=dict)
    """Producer's engine id → request id → what to pull."""
    reqs_to_send: dict[str, tuple[str, Sequence[Sequence[int]]]] = field(default_factory=dict)
    """Request id → transfer id and blocks; no list at all: announced, not finished yet."""
    reqs_not_processed: dict[str, None] = field(default_factory=dict)
    """Transfer ids of requests that ended without anything to send, in that order."""

    def __bool__(self) -> bool:
        return bool(self.reqs_to_recv or self.reqs_to_send or self.reqs_not_processed)
