"""ZeroMQ sockets on the loopback interface, read beside an event loop: none ever blocks, and all are given back."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from kvreplay.transport.http import LOOPBACK
from kvreplay.transport.paced import PacedLoop

Socket: TypeAlias = Any
"""A ZeroMQ socket; the library is only there where it is used."""
OnFrames: TypeAlias = Callable[[list[bytes]], None]

_MAX_DRAINED: Final = 256
"""Messages of one socket between two looks at the others."""
_MAX_SOCKETS: Final = 1 << 14
_MAX_IDENTITY_BYTES: Final = 255


class ZmqSockets:
    """All sockets of one process. Frames over a socket's limit never arrive: its peer is hung up on."""

    def __init__(self, paced: PacedLoop) -> None:
        import zmq

        self._zmq = zmq
        self._context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, _MAX_SOCKETS)
        self._paced = paced
        self._open: dict[Socket, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    def router(self, max_bytes: int, on_frames: OnFrames) -> tuple[Socket, str]:
        """Bound to a free port; and its endpoint. The first frame that comes is the sender's identity."""
        router = self._make(self._zmq.ROUTER, max_bytes)
        port = router.bind_to_random_port(f"tcp://{LOOPBACK}")
        self._watch(router, on_frames)
        return router, f"tcp://{LOOPBACK}:{port}"

    def dealer(self, endpoint: str, identity: str, max_bytes: int, on_frames: OnFrames) -> Socket:
        dealer = self._make(self._zmq.DEALER, max_bytes)
        dealer.set(self._zmq.IDENTITY, identity.encode("latin-1", "replace")[-_MAX_IDENTITY_BYTES:])
        dealer.connect(endpoint)
        self._watch(dealer, on_frames)
        return dealer

    def send(self, socket: Socket, frames: Sequence[bytes]) -> bool:
        """False: it takes no more, or its peer is unknown."""
        try:
            socket.send_multipart(frames, self._zmq.NOBLOCK)
        except self._zmq.ZMQError:
            return False
        return True

    def close(self, socket: Socket) -> None:
        if self._open.pop(socket, True) is None:
            self._paced.unwatch(socket)
            socket.close()

    def close_all(self) -> None:
        for socket in list(self._open):
            self.close(socket)
        self._context.destroy(linger=0)

    def _make(self, kind: int, max_bytes: int) -> Socket:
        socket = self._context.socket(kind)
        socket.set(self._zmq.LINGER, 0)
        socket.set(self._zmq.MAXMSGSIZE, max_bytes)
        self._open[socket] = None
        return socket

    def _watch(self, socket: Socket, on_frames: OnFrames) -> None:
        self._paced.watch(socket, lambda: self._drain(socket, on_frames))

    def _drain(self, socket: Socket, on_frames: OnFrames) -> None:
        for _ in range(_MAX_DRAINED):
            if socket not in self._open:
                return
            try:
                frames = socket.recv_multipart(self._zmq.NOBLOCK)
            except self._zmq.Again:
                return
            on_frames(frames)
