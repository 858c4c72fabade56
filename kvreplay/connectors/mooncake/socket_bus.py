"""The bus of one instance's process: what stays in the process is delivered, the rest goes over loopback sockets.

A consumer's rank opens a DEALER for each pull, as vLLM's does, to the ROUTER of the producer's rank; pulls and replies
are one frame each, with the bytes that vLLM sends. Engine writes and their ends have a second pair of sockets,
bootstrap queries are HTTP. Names stay those of the virtual bus (`P0/mooncake/0`); a directory says where each of them
listens.

Faults act at the consumer's sockets: on what it sends, and on what has arrived.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

import msgspec

from kvreplay.connectors.mooncake.addresses import instance_of
from kvreplay.connectors.mooncake.pull_sockets import MAX_PULL_BYTES, PullSockets
from kvreplay.connectors.mooncake.structs import (
    CONNECTION_CLOSED,
    STRAY_FRAMES,
    BootstrapAnswer,
    BootstrapQuery,
    MooncakeXferResponseStatus,
    decode_request,
    encode,
)
from kvreplay.connectors.mooncake.write_frames import (
    FrameError,
    TargetMemory,
    decode_done,
    decode_write,
    encode_done,
    encode_write,
)
from kvreplay.sim.bus import Bus, Network, owner_of
from kvreplay.sim.envelope import (
    BOOTSTRAP_ANSWER,
    BOOTSTRAP_QUERY,
    BOOTSTRAP_REGISTER,
    BOOTSTRAP_REGISTERED,
    PULL_REPLY,
    PULL_REQUEST,
    WRITE_DATA,
    WRITE_DONE,
    Envelope,
    Handler,
)
from kvreplay.sim.recent import Recent
from kvreplay.transport.http import Exchange, HttpCall, HttpServer
from kvreplay.transport.paced import PacedLoop, Place
from kvreplay.transport.traffic import Connection, Traffic
from kvreplay.transport.zmq_sockets import Socket, ZmqSockets

_HTTP: Final = "http/"
"""Begins the address of an HTTP client that waits for an answer."""
_FAULTED_WHERE_SENT: Final = frozenset({PULL_REQUEST, BOOTSTRAP_QUERY, BOOTSTRAP_REGISTER, WRITE_DONE})
_ALWAYS_OUT: Final = frozenset({BOOTSTRAP_QUERY, BOOTSTRAP_REGISTER})
"""Goes over a socket even to a server of this very process."""
_TOGETHER: Final = (WRITE_DATA, WRITE_DONE, PULL_REQUEST, PULL_REPLY)
_MAX_WRITE_BYTES: Final = 1 << 30
_MAX_OPEN: Final = 1 << 14
"""Pulls that wait here at a time; real consumers have some hundreds."""
_MAX_KNOWN: Final = 1 << 16
"""Pulls that are over, peers, and exchanges that are remembered."""


class SocketBus(Bus):
    """`announce` is told where this process listens, whenever that changes. `is_open`: whether a pull of this source
    still waits for a reply. `find_target`: the memory behind an address. `relays`: pulls stay the bytes that they are.
    `network`: how long messages are held before they are sent, None for not at all.
    """

    def __init__(
        self,
        name: str,
        paced: PacedLoop,
        *,
        announce: Callable[[Mapping[str, str]], None],
        is_open: Callable[[str, str, int], bool],
        find_target: Callable[[str], TargetMemory | None],
        tells_of_gone_peers: bool,
        relays: bool = False,
        network: Network | None = None,
    ) -> None:
        super().__init__(paced.loop, network)
        self.name = name
        self.malformed: Counter[str] = Counter()
        """What came in and was nothing that a peer sends, by kind."""
        self.traffic = Traffic()
        self._paced = paced
        self._sockets = ZmqSockets(paced)
        self._pulls = PullSockets(
            name,
            paced.loop,
            self._sockets,
            self.traffic,
            arrived=self._arrive_through_faults,
            is_open=is_open,
            malformed=self.malformed,
        )
        self._announce = announce
        self._find_target = find_target
        self._tells_of_gone_peers = tells_of_gone_peers
        self._relays = relays
        self._endpoints: dict[str, str] = {}
        self._directory: dict[str, str] = {}
        self._routers: dict[str, Socket] = {}
        self._servers: dict[str, HttpServer] = {}
        self._asked: Recent[str, str] = Recent(_MAX_KNOWN)
        """Pulls that others wait for here → the address at which they came in."""
        self._engines: dict[str, tuple[Socket, Connection]] = {}
        """Memory → the socket to it."""
        self._writers: Recent[str, tuple[str, bytes]] = Recent(_MAX_KNOWN)
        """Who has written here → the memory's address, and the name of the writer's socket."""
        self._exchanges: Recent[str, Exchange] = Recent(_MAX_KNOWN)
        self.num_exchanges = 0
        """Requests that its HTTP servers have taken."""
        self._calls: dict[str, tuple[HttpCall, Connection]] = {}
        self._send_back: Mapping[str, Callable[[Envelope], bool]] = {
            PULL_REPLY: self._send_reply,
            WRITE_DONE: self._send_done,
        }
        """Goes the way that it was asked for."""
        self._send_to: Mapping[str, Callable[[Envelope, str], bool]] = {
            PULL_REQUEST: self._pulls.send,
            STRAY_FRAMES: self._pulls.send,
            WRITE_DATA: self._send_write,
            BOOTSTRAP_QUERY: self._call_bootstrap,
            BOOTSTRAP_REGISTER: self._call_bootstrap,
        }
        """Goes to where its destination listens."""

    # -- where who listens --------------------------------------------------------------------------------

    def listen(self, address: str, handler: Handler, *, refused: Handler | None = None) -> None:
        super().listen(address, handler, refused=refused)
        part = address.partition("/")[2].partition("/")[0]
        if part in ("", "mooncake"):
            self._bind(address, MAX_PULL_BYTES, self._on_pull)
        elif part == "memory":
            self._bind(address, _MAX_WRITE_BYTES, self._on_write)
        elif part == "bootstrap":
            server = HttpServer(self._paced, lambda exchange: self._on_http(address, exchange))
            self._servers[address] = server
            self._endpoints[address] = server.endpoint
        else:
            return
        self._announce(self._endpoints)

    def silence(self, address: str) -> None:
        super().silence(address)
        endpoint = self._endpoints.pop(address, None)
        if endpoint is not None:
            self.traffic.gone(endpoint)
        router = self._routers.pop(address, None)
        if router is not None:
            self._sockets.close(router)
        server = self._servers.pop(address, None)
        if server is not None:
            server.close()
        self._pulls.drop(address)

    def _bind(self, address: str, max_bytes: int, on_frames: Callable[[str, list[bytes]], None]) -> None:
        self._routers[address], self._endpoints[address] = self._sockets.router(
            max_bytes, lambda frames: on_frames(address, frames)
        )

    def update_directory(self, endpoints: Mapping[str, str], gone: str | None = None) -> None:
        """Somebody listens somewhere else, or (`gone`) an instance does not any more."""
        if gone is not None:
            for address in [address for address in self._directory if owner_of(address) == gone]:
                del self._directory[address]
                if address in self._engines:
                    engine, connection = self._engines.pop(address)
                    self._sockets.close(engine)
                    self.traffic.closed(connection)
            if self._tells_of_gone_peers:
                self._tell_of(gone)
        for address, endpoint in endpoints.items():
            if owner_of(address) != self.name:
                self._directory[address] = endpoint
                for action in self._awaited.pop(address, ()):
                    self.loop.call_later(0, action)

    def _tell_of(self, gone: str) -> None:
        """The operating system closes a dead process's connections."""
        for asked in self._pulls.asked_of(gone):
            self._arrive_here(self._notice(asked.destination, asked.source, asked))
        for conversation, address in list(self._asked.items()):
            if instance_of(conversation) == gone:
                del self._asked[conversation]
                closed = Envelope(kind="", source="", destination="", payload=None, conversation=conversation)
                self._arrive_here(self._notice(gone, address, closed))

    @staticmethod
    def _notice(source: str, destination: str, of: Envelope) -> Envelope:
        return Envelope(
            kind=CONNECTION_CLOSED,
            source=source,
            destination=destination,
            payload=None,
            conversation=of.conversation,
            attempt=of.attempt,
        )

    # -- sending ------------------------------------------------------------------------------------------

    def post(self, envelope: Envelope) -> None:
        transit_ns = self.network.transit_ns(envelope, self.loop.now_ns)
        send = self._through_faults if envelope.kind in _FAULTED_WHERE_SENT else self._forward
        if transit_ns or envelope.kind == BOOTSTRAP_REGISTER:
            # Who registers is only being built: first let all of it be there.
            self.loop.call_later(transit_ns, lambda: send(envelope))
        else:
            send(envelope)

    def deliver(self, envelope: Envelope) -> None:
        if envelope.destination in self._handlers or envelope.kind != CONNECTION_CLOSED:
            self._forward(envelope)

    def _through_faults(self, envelope: Envelope) -> None:
        interceptor, loop = self.interceptor, self.loop
        deliveries = None
        if interceptor is not None and envelope.kind in interceptor.kinds:
            deliveries = interceptor.intercept(envelope, loop.now_ns)
        if interceptor is None or deliveries is None:
            self._forward(envelope)
            return
        for delivery in deliveries:
            ready_ns, sent = loop.now_ns + delivery.delay_ns, delivery.envelope

            def release(ready_ns: int = ready_ns, sent: Envelope = sent) -> None:
                loop.call_at(max(ready_ns, loop.now_ns), lambda: self._forward(sent))

            if delivery.waits_for:
                interceptor.hold(delivery, release)
            elif delivery.delay_ns:
                release()
            else:
                self._forward(sent)  # in the order in which they are sent

    def _forward(self, envelope: Envelope) -> None:
        """To whom it may concern: here, or over a socket."""
        destination = envelope.destination
        if destination.startswith(_HTTP):
            self._answer_http(envelope)
        elif (destination in self._handlers or owner_of(destination) == self.name) and envelope.kind not in _ALWAYS_OUT:
            self.loop.call_later(0, lambda: super(SocketBus, self).deliver(envelope))
        elif not self._send_out(envelope):
            self.loop.call_later(0, lambda: self._refuse(envelope))

    def _send_out(self, envelope: Envelope) -> bool:
        """False: nobody listens there."""
        kind, destination = envelope.kind, envelope.destination
        if kind in self._send_back:
            return self._send_back[kind](envelope)
        endpoint = self._directory.get(destination) or self._endpoints.get(destination)
        if endpoint is None:
            return False
        assert kind in self._send_to, f"{kind} to {destination}"
        return self._send_to[kind](envelope, endpoint)

    def asked_as(self, identity: str) -> Envelope | None:
        """The pull of the socket that its producer knows by this name; None: none of this process's."""
        return self._pulls.asked_as(identity)

    # -- pulls, where they are served ---------------------------------------------------------------------

    def _on_pull(self, address: str, frames: list[bytes]) -> None:
        identity, *rest = frames
        conversation = identity.decode("latin-1")
        self.traffic.taken(Connection(self._endpoints[address], conversation))
        if len(self._asked) >= _MAX_OPEN and conversation not in self._asked:
            self.malformed["pull too many"] += 1
            return
        received = Envelope(
            kind=STRAY_FRAMES, source=conversation, destination=address, payload=tuple(rest), conversation=conversation
        )
        if len(rest) == 1 and self._relays:
            received.kind, received.payload = PULL_REQUEST, rest[0]
        elif len(rest) == 1:
            received.kind, received.payload = PULL_REQUEST, rest[0]
            try:
                pull = decode_request(rest[0])
            except msgspec.MsgspecError:
                self.malformed["pull"] += 1
            else:
                received.payload = pull
                received.request_ids = tuple(pull.req_blocks)
                received.transfer_ids = tuple(transfer_id for transfer_id, _ in pull.req_blocks.values())
        else:
            self.malformed["pull"] += 1
        self._asked[conversation] = address
        self._arrive_here(received)

    def _send_reply(self, envelope: Envelope) -> bool:
        router = self._routers.get(envelope.source)
        payload = envelope.payload
        if router is None:
            return True  # this worker is gone
        if not isinstance(payload, bytes) and payload.status is not MooncakeXferResponseStatus.CONTINUE:
            self._asked.pop(envelope.conversation, None)
        frame = payload if isinstance(payload, bytes) else encode(payload)
        if self._sockets.send(router, [envelope.conversation.encode("latin-1"), frame]):
            self.traffic.sent(Connection(self._endpoints[envelope.source], envelope.conversation), is_answer=True)
        return True

    # -- writes -------------------------------------------------------------------------------------------

    def _send_write(self, envelope: Envelope, endpoint: str) -> bool:
        frames = encode_write(envelope)
        if frames is None:
            return True  # nothing is sent, and so nothing ends before its deadline
        known = self._engines.get(envelope.destination)
        if known is None:
            connection = Connection(endpoint, f"{self.name}!engine")
            engine = self._sockets.dealer(
                endpoint, connection.identity, _MAX_WRITE_BYTES, lambda frames: self._on_done(connection, frames)
            )
            known = self._engines[envelope.destination] = engine, connection
            self.traffic.opened(connection)
        engine, connection = known
        is_sent = self._sockets.send(engine, frames)
        if is_sent:
            self.traffic.sent(connection)
        return is_sent

    def _on_write(self, address: str, frames: list[bytes]) -> None:
        identity, *rest = frames
        self.traffic.taken(Connection(self._endpoints[address], identity.decode("latin-1")))
        target = self._find_target(address)
        try:
            header, received = decode_write(rest, target)
        except FrameError:
            self.malformed["write"] += 1
            return
        # Its pull is known here by another name: that of the socket that asked is on the wire.
        asked = self._pulls.asked_as(header.pull)
        received.destination = address
        if asked is not None:
            received.payload = replace(received.payload, pull=asked.conversation, attempt=asked.attempt)
            received.conversation = f"{asked.conversation}/{header.conversation.rpartition('/')[2]}"
            received.attempt = asked.attempt
            received.peer_index, received.num_peers = asked.peer_index, asked.num_peers
        self._writers[header.source] = (address, identity)
        self._arrive_through_faults(received)

    def _send_done(self, envelope: Envelope) -> bool:
        address, identity = self._writers.get(envelope.destination, ("", b""))
        router = self._routers.get(address)
        if router is None:
            return False
        if self._sockets.send(router, [identity, encode_done(envelope.payload, envelope.destination)]):
            self.traffic.sent(Connection(self._endpoints[address], identity.decode("latin-1")), is_answer=True)
        return True

    def _on_done(self, connection: Connection, frames: list[bytes]) -> None:
        self.traffic.taken(connection, is_answer=True)
        try:
            address, done = decode_done(frames)
        except FrameError:
            self.malformed["write"] += 1
            return
        self._arrive_here(Envelope(kind=WRITE_DONE, source="", destination=address, payload=done))

    # -- bootstrap ----------------------------------------------------------------------------------------

    def _on_http(self, address: str, exchange: Exchange) -> None:
        request = exchange.request
        self.traffic.taken(Connection(self._endpoints[address], exchange.client))
        self.num_exchanges += 1
        client = f"{_HTTP}{self.num_exchanges}"
        self._exchanges[client] = exchange
        is_get = request.method == "GET"
        self._arrive_here(
            Envelope(
                kind=BOOTSTRAP_QUERY if is_get else BOOTSTRAP_REGISTER,
                source=client,
                destination=address,
                payload=BootstrapQuery(request.path, None if is_get else request.body),
            )
        )

    def tidy(self) -> None:
        """Close the sockets of pulls that are over; to be called now and then."""
        self._pulls.tidy()

    def _answer_http(self, envelope: Envelope) -> None:
        exchange = self._exchanges.pop(envelope.destination, None)
        if exchange is None:
            return
        answer: BootstrapAnswer = envelope.payload
        # To hang up is something to hear, too.
        self.traffic.sent(Connection(self._endpoints.get(envelope.source, ""), exchange.client), is_answer=True)
        if answer.error is not None:
            exchange.hang_up()
        else:
            exchange.answer(answer.status, answer.body or b"")

    def _call_bootstrap(self, envelope: Envelope, endpoint: str) -> bool:
        conversation = envelope.conversation
        self._hang_up(conversation)

        def on_answer(status: int, body: bytes, error: str | None) -> None:
            self._hang_up(conversation)
            answer = replace(
                envelope,
                kind=BOOTSTRAP_ANSWER if envelope.kind == BOOTSTRAP_QUERY else BOOTSTRAP_REGISTERED,
                source=envelope.destination,
                destination=envelope.source,
                payload=BootstrapAnswer(status, body, error),
            )
            self._arrive_through_faults(answer)

        query: BootstrapQuery = envelope.payload
        call = HttpCall(self._paced, endpoint, query.path, query.body, on_answer)
        connection = Connection(endpoint, call.client)
        self._calls[conversation] = call, connection
        self.traffic.opened(connection)
        self.traffic.sent(connection)
        return True

    def _hang_up(self, conversation: str) -> None:
        """The call is over, or another one takes its place."""
        if conversation in self._calls:
            call, connection = self._calls.pop(conversation)
            call.cancel()
            self.traffic.closed(connection)

    # -- all ----------------------------------------------------------------------------------------------

    def _arrive_here(self, envelope: Envelope) -> None:
        self._paced.arrive(lambda: super(SocketBus, self).deliver(envelope), _place_of(envelope))

    def _arrive_through_faults(self, envelope: Envelope) -> None:
        self._paced.arrive(lambda: self._through_faults(envelope), _place_of(envelope))

    def close(self) -> None:
        """Give back every socket."""
        for server in self._servers.values():
            server.close()
        for call, _ in self._calls.values():
            call.cancel()
        self._sockets.close_all()


def _place_of(envelope: Envelope) -> Place:
    """Of what arrives together over several sockets: bytes before what is said of them, who has gone last; pulls in
    the order in which their sockets were opened, a conversation's messages in that in which they came."""
    kind = envelope.kind
    order = _TOGETHER.index(kind) if kind in _TOGETHER else len(_TOGETHER) + (kind == CONNECTION_CLOSED)
    if kind in (BOOTSTRAP_QUERY, BOOTSTRAP_REGISTER):  # its source is numbered as it came
        query: BootstrapQuery = envelope.payload
        return order, envelope.destination, 0, query.path, query.body or b""
    socket, _, number = envelope.conversation.rpartition("!")
    if socket and number.isdecimal():
        return order, "", int(number), socket, b""
    return order, envelope.source, 0, envelope.conversation, b""
