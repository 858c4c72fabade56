"""What listens on a socket hears anybody: frames as vLLM's, and peers that are none."""

import random
import socket
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec
import pytest
import zmq

from kvreplay.connectors.mooncake import socket_bus
from kvreplay.connectors.mooncake.structs import MooncakeXferMetadata, decode_request, decode_response, encode
from kvreplay.connectors.mooncake.write_frames import encode_write
from kvreplay.sim.envelope import PULL_REQUEST, WRITE_DATA
from tests.connectors.mooncake.pair import Pair
from tests.connectors.mooncake.socket_pair import SocketPair

PULLS, WRITES, BOOTSTRAP = "P0/mooncake/0", "D0/memory/0", "P0/bootstrap"
GOOD = [("P0", ["p1"]), ("D0", ["d1"])]


@dataclass
class Stranger:
    """Somebody else on the machine."""

    pair: SocketPair
    context: zmq.Context[zmq.Socket[bytes]] = field(default_factory=zmq.Context)
    sockets: list[socket.socket] = field(default_factory=list)
    peers: list["zmq.Socket[bytes]"] = field(default_factory=list)

    def endpoint(self, address: str) -> str:
        return self.pair._endpoints[address.partition("/")[0]][address]

    def dealer(self, address: str, identity: bytes = b"") -> "zmq.Socket[bytes]":
        dealer = self.open(zmq.DEALER)
        if identity:
            dealer.identity = identity
        dealer.connect(self.endpoint(address))
        return dealer

    def open(self, kind: int) -> "zmq.Socket[bytes]":
        self.peers.append(self.context.socket(kind))
        self.peers[-1].linger = 0
        return self.peers[-1]

    def connect(self, address: str) -> socket.socket:
        host, _, port = self.endpoint(address).removeprefix("tcp://").rpartition(":")
        self.sockets.append(socket.create_connection((host, int(port)), timeout=5))
        return self.sockets[-1]

    def close(self) -> None:
        for each in self.sockets:
            each.close()
        for peer in self.peers:
            peer.close()
        self.context.term()

    def malformed(self, instance: str) -> dict[str, int]:
        return dict(self.pair.buses[instance].malformed)


@pytest.fixture
def pair() -> Iterator[SocketPair]:
    made = SocketPair()
    made.strangers_s = 0.1
    yield made
    made.close()


@pytest.fixture
def stranger(pair: SocketPair) -> Iterator[Stranger]:
    made = Stranger(pair)
    yield made
    made.close()


def check_good_pull(pair: SocketPair) -> None:
    pair.finish()
    pair.pull()
    pair.run()
    assert [(instance, finished) for instance, _, finished, _, _ in pair.reports] == GOOD
    assert pair.d_memory.block(4) == pair.p_memory.block(1)


def test_frames_are_those_of_the_virtual_bus(pair: SocketPair, stranger: Stranger) -> None:
    """A pull, as the bytes that reach a producer, and its reply, as the bytes that reach a consumer."""
    virtual = Pair(encodes_messages=True)
    virtual.finish()
    virtual.pull()
    virtual.run()
    payloads = {envelope.kind: envelope.payload for envelope in virtual.wire.sent}

    router = stranger.open(zmq.ROUTER)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    pair.buses["D0"].update_directory({PULLS: f"tcp://127.0.0.1:{port}"})
    pair.pull()
    pair.run(20)
    _, pull = router.recv_multipart(zmq.NOBLOCK)
    assert pull == payloads[PULL_REQUEST]

    dealer = stranger.dealer(PULLS)
    pair.finish()
    dealer.send(pull)
    pair.run(20)
    (reply,) = dealer.recv_multipart(zmq.NOBLOCK)
    assert reply == payloads["pull.reply"]


class TestPulls:
    def test_random_bytes_are_counted_and_answered_with_an_error(self, pair: SocketPair, stranger: Stranger) -> None:
        random_bytes = random.Random(1)
        dealer = stranger.dealer(PULLS)
        for length in range(1, 200):
            dealer.send(random_bytes.randbytes(length))
        pair.run(20)
        assert stranger.malformed("P0") == {"pull": 199}
        assert decode_response(dealer.recv(zmq.NOBLOCK)).status.name == "ERROR"
        check_good_pull(pair)

    def test_pulls_for_unknown_transfers_do_not_grow_without_bound(
        self, pair: SocketPair, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(socket_bus, "_MAX_OPEN", 50)
        pull = decode_request(encode(MooncakeXferMetadata("D0", 17100, 1, 0, {}, [], [], [])))
        pair.d.memory.layout.describe(pull)
        for number in range(80):
            pull.req_blocks = {f"x{number}": (f"unknown{number}", [[4]])}
            stranger.dealer(PULLS).send(encode(pull))
        pair.run(20)
        assert stranger.malformed("P0") == {"pull too many": 30}

    def test_a_pull_cut_off_anywhere_is_refused(self, pair: SocketPair, stranger: Stranger) -> None:
        frame = encode(MooncakeXferMetadata("D0", 17100, 1, 0, {"d1": ("X1", [[4]])}, [1], [8], [8]))
        dealer = stranger.dealer(PULLS)
        for length in range(len(frame)):
            dealer.send(frame[:length])
        pair.run(20)
        assert stranger.malformed("P0") == {"pull": len(frame)}
        check_good_pull(pair)

    def test_an_oversized_frame_never_arrives(self, pair: SocketPair, stranger: Stranger) -> None:
        stranger.dealer(PULLS).send(bytes((1 << 24) + 1))
        pair.run(20)
        assert stranger.malformed("P0") == {}
        check_good_pull(pair)

    @pytest.mark.parametrize(
        ("identity", "ends"),
        [(b"D0/mooncake/0!1", []), (b"\xff\x00nobody", GOOD), (b"/", GOOD), (b"x" * 255, GOOD)],
        ids=["taken", "binary", "slash", "long"],
    )
    def test_a_wrong_identity_is_one_more_peer(
        self, pair: SocketPair, stranger: Stranger, identity: bytes, ends: list[tuple[str, list[str]]]
    ) -> None:
        """Who takes another's name before it is used keeps it: that pull goes unheard, and nothing else happens."""
        dealer = stranger.dealer(PULLS, identity)
        dealer.send(b"\xc1")
        pair.run(20)
        assert stranger.malformed("P0") == {"pull": 1}
        pair.finish()
        pair.pull()
        pair.run(30)
        assert [(instance, finished) for instance, _, finished, _, _ in pair.reports] == ends

    def test_blocks_for_a_memory_that_is_nobodys(self, pair: SocketPair, stranger: Stranger) -> None:
        pair.finish()
        pair.pull()
        pair.run(1)
        pull = decode_request(encode(MooncakeXferMetadata("nowhere", 1, 1, 0, {"d1": ("X9", [[4]])}, [], [], [])))
        layout = pair.d.memory.layout
        layout.describe(pull)
        pair.finish(p_req_id="p9", transfer_id="X9")
        dealer = stranger.dealer(PULLS)
        dealer.send(msgspec.msgpack.encode(pull))
        pair.run(20)
        assert decode_response(dealer.recv(zmq.NOBLOCK)).err_reqs == ["d1"]


class TestWrites:
    def frames(self) -> list[bytes]:
        """A write that is good, but for whom it names."""
        virtual = Pair()
        virtual.finish()
        virtual.pull()
        virtual.run()
        (write,) = [envelope for envelope in virtual.wire.sent if envelope.kind == WRITE_DATA]
        frames = encode_write(write)
        assert frames is not None
        return frames

    def test_random_bytes_and_parts_of_a_write_are_counted(self, pair: SocketPair, stranger: Stranger) -> None:
        random_bytes = random.Random(2)
        header, descriptors, data = self.frames()
        dealer = stranger.dealer(WRITES)
        bad = [
            [header],
            [header, descriptors],
            [header, descriptors, data, b""],
            [header, descriptors, data[:-1]],
            [header, descriptors, data + b"x"],
            [header, descriptors[:-8], data],
            *([header[:length], descriptors, data] for length in range(0, len(header), 7)),
            *([random_bytes.randbytes(50) for _ in range(3)] for _ in range(50)),
        ]
        for frames in bad:
            dealer.send_multipart(frames)
        pair.run(20)
        assert stranger.malformed("D0") == {"write": len(bad)}
        assert pair.d_memory.blocks == {}
        check_good_pull(pair)

    @pytest.mark.parametrize(
        ("field_name", "value"),
        [
            ("block", 64),
            ("block", -1),
            ("group", 7),
            ("base_addr", 1),
            ("offset", -8),
            ("length", 1 << 40),
            ("width", 1),
        ],
    )
    def test_a_write_outside_the_memory_lands_nowhere(
        self, pair: SocketPair, stranger: Stranger, field_name: str, value: int
    ) -> None:
        header, descriptors, data = self.frames()
        fields = msgspec.msgpack.decode(header)
        (segment,), ((own, peers, part),) = fields[8], fields[9]
        match field_name:
            case "block":
                segment[4][0] = value
            case "group":
                segment[2] = value
            case "base_addr":
                peers["base_addr"] = value
            case "offset":
                part[1] = value
            case "length":
                part[2] = own["kv_block_len"] = value
            case "width":
                fields[10] = [value]
        stranger.dealer(WRITES).send_multipart([msgspec.msgpack.encode(fields), descriptors, data])
        pair.run(20)
        assert stranger.malformed("D0") == {"write": 1}
        assert pair.d_memory.blocks == {}


class TestBootstrap:
    @pytest.mark.parametrize(
        "request_bytes",
        [
            b"\x00" * 100 + b"\r\n\r\n",
            b"GET\r\n\r\n",
            b"DELETE /query HTTP/1.1\r\n\r\n",
            b"POST /register HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
            b"POST /register HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
            b"A" * 70_000,
        ],
    )
    def test_what_is_no_request_is_refused(self, pair: SocketPair, stranger: Stranger, request_bytes: bytes) -> None:
        client = stranger.connect(BOOTSTRAP)
        client.sendall(request_bytes)
        pair.run(20)
        assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        check_good_pull(pair)

    def test_a_registration_that_is_none_is_told_so(self, pair: SocketPair, stranger: Stranger) -> None:
        client = stranger.connect(BOOTSTRAP)
        client.sendall(b"POST /register HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}")
        pair.run(20)
        assert client.recv(100).startswith(b"HTTP/1.1 422 ")

    def test_a_client_that_says_nothing_keeps_nobody_waiting(self, pair: SocketPair, stranger: Stranger) -> None:
        stranger.connect(BOOTSTRAP)
        check_good_pull(pair)


@pytest.mark.parametrize("address", [PULLS, WRITES, BOOTSTRAP])
def test_thousands_of_connections(pair: SocketPair, stranger: Stranger, address: str) -> None:
    for number in range(2000):
        client = stranger.connect(address)
        client.send(b"\x00 nothing that anybody says")
        if number % 10:
            client.close()
            stranger.sockets.pop()
        if not number % 50:
            pair.listen()
    pair.run(5)
    check_good_pull(pair)


def test_every_socket_is_given_back(pair: SocketPair) -> None:
    check_good_pull(pair)
    pair.run(10)
    bus = pair.buses["D0"]
    assert len(bus._sockets) + len(bus._servers) == 2  # its two ROUTERs; the pull's DEALER is closed
    for bus in pair.buses.values():
        bus.close()
        assert all(router.closed for router in bus._routers.values())
