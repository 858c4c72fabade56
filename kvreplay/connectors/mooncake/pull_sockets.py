"""The consumer's end of pulls over real sockets: a DEALER for each, from the pull to its last reply."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import msgspec

from kvreplay.connectors.mooncake.structs import (
    STRAY_FRAMES,
    MooncakeXferResponseStatus,
    decode_response,
    encode,
)
from kvreplay.sim.bus import owner_of
from kvreplay.sim.envelope import PULL_REPLY, PULL_REQUEST, Envelope
from kvreplay.sim.event_loop import EventLoop
from kvreplay.sim.recent import Recent
from kvreplay.transport.traffic import Connection, Traffic
from kvreplay.transport.zmq_sockets import Socket, ZmqSockets

MAX_PULL_BYTES: Final = 1 << 24
_MAX_PAST: Final = 1 << 16
_MAX_SILENT: Final = 256
"""Sockets of pulls that have been given up, and may still be answered."""


@dataclass(slots=True, eq=False)
class _Pull:
    """A pull that this process has asked for, and its socket."""

    socket: Socket
    connection: Connection
    asked: Envelope
    owed: dict[str, str]
    """Requests that no reply has named → their transfers."""
    num_replies: int = 0
    sent_ns: int = 0
    is_answered: bool = False
    """No further reply will come."""


class PullSockets:
    """`arrived` gets each reply; `is_open` tells whether the pull of (source, conversation, attempt) waits for one."""

    def __init__(
        self,
        instance: str,
        loop: EventLoop,
        sockets: ZmqSockets,
        traffic: Traffic,
        *,
        arrived: Callable[[Envelope], None],
        is_open: Callable[[str, str, int], bool],
        malformed: Counter[str],
    ) -> None:
        self._instance = instance
        self._loop = loop
        self._sockets = sockets
        self._traffic = traffic
        self._arrived = arrived
        self._is_open = is_open
        self._malformed = malformed
        self._pulls: dict[str, _Pull] = {}
        self._past: Recent[str, Envelope] = Recent(_MAX_PAST)
        """Identities of sockets → the pulls for which they were, over or not."""
        self._num_sockets = 0

    def send(self, envelope: Envelope, endpoint: str) -> bool:
        """A pull, or what a stranger sends before it. Another attempt has another socket, as vLLM's has.

        True: that nobody takes it is nothing that a DEALER socket would say.
        """
        pull = self._pulls.get(envelope.conversation)
        if pull is not None and pull.asked.attempt != envelope.attempt:
            self._forget(envelope.conversation)
            pull = None
        if pull is None:
            pull = self._open(envelope, endpoint)
        if envelope.kind == STRAY_FRAMES:
            frames = list(envelope.payload)
        else:
            pull.asked = envelope
            pull.num_replies, pull.is_answered = 0, False
            pull.owed = dict(zip(envelope.request_ids, envelope.transfer_ids, strict=True))
            self._past[pull.connection.identity] = envelope
            payload = envelope.payload
            frames = [payload if isinstance(payload, bytes) else encode(payload)]
        pull.sent_ns = self._loop.now_ns
        if self._sockets.send(pull.socket, frames):
            self._traffic.sent(pull.connection)
        return True

    def asked_as(self, identity: str) -> Envelope | None:
        """The pull of the socket that a producer knows by this name."""
        return self._past.get(identity)

    def asked_of(self, instance: str) -> Iterator[Envelope]:
        """The open pulls from this producer."""
        yield from [pull.asked for pull in self._pulls.values() if owner_of(pull.asked.destination) == instance]

    def tidy(self) -> None:
        """Close the sockets of pulls that are over; to be called now and then.

        What was sent at this instant may still be on its way, and would be lost. Pulls that nobody waits for any more,
        a stranger's or one that was given up, stay until they are answered: faults count such replies, too.
        """
        silent = []
        for conversation, pull in list(self._pulls.items()):
            asked = pull.asked
            if pull.sent_ns >= self._loop.now_ns or self._is_open(asked.source, conversation, asked.attempt):
                continue
            if pull.is_answered:
                self._forget(conversation)
            else:
                silent.append(conversation)
        for conversation in silent[:-_MAX_SILENT]:
            self._forget(conversation)

    def drop(self, source: str) -> None:
        """Whoever asked is gone."""
        for conversation, pull in list(self._pulls.items()):
            if pull.asked.source == source:
                self._forget(conversation)

    def _open(self, envelope: Envelope, endpoint: str) -> _Pull:
        self._num_sockets += 1
        # What it is called tells the producer who asks; the number tells its pulls apart.
        source = envelope.source if envelope.kind == PULL_REQUEST else f"{self._instance}/mooncake/0"
        identity = f"{source}!{self._num_sockets}"
        conversation = envelope.conversation
        dealer = self._sockets.dealer(
            endpoint, identity, MAX_PULL_BYTES, lambda frames: self._on_reply(conversation, frames)
        )
        pull = self._pulls[conversation] = _Pull(dealer, Connection(endpoint, identity), envelope, {})
        self._traffic.opened(pull.connection)
        return pull

    def _forget(self, conversation: str) -> None:
        pull = self._pulls.pop(conversation)
        self._sockets.close(pull.socket)
        self._traffic.closed(pull.connection)

    def _on_reply(self, conversation: str, frames: list[bytes]) -> None:
        pull = self._pulls.get(conversation)
        if pull is None:
            return
        self._traffic.taken(pull.connection, is_answer=True)
        if len(frames) != 1:
            self._malformed["reply"] += 1
            return
        asked = pull.asked
        named = [name for name in self._named_in(frames[0], pull) if name in pull.owed]
        transfers = tuple(pull.owed.pop(name) for name in named)
        reply = Envelope(
            kind=PULL_REPLY,
            source=asked.destination,
            destination=asked.source,
            payload=frames[0],
            request_ids=tuple(named),
            transfer_ids=transfers,
            conversation=asked.conversation,
            attempt=asked.attempt,
            peer_index=asked.peer_index,
            num_peers=asked.num_peers,
            reply_index=pull.num_replies,
        )
        pull.num_replies += 1
        self._arrived(reply)

    def _named_in(self, frame: bytes, pull: _Pull) -> list[str]:
        """The requests that a reply is about: the last one's are all that are left."""
        try:
            response = decode_response(frame)
        except msgspec.MsgspecError:
            self._malformed["reply"] += 1
            return list(pull.owed)
        if response.status is MooncakeXferResponseStatus.CONTINUE:
            return list(dict.fromkeys([*(response.ok_reqs or ()), *(response.err_reqs or ())]))
        pull.is_answered = True
        return list(pull.owed)
