"""Messages between a supervisor and its processes: frames with their length, over a pair of pipes that never block."""

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

from kvreplay.transport.paced import PacedLoop

_LENGTH_BYTES: Final = 4
_CHUNK: Final = 1 << 16
MAX_MESSAGE_BYTES: Final = 1 << 30


class FramedPipes:
    """One end. `on_message` gets each frame; `on_closed` is called once when the other end is gone."""

    def __init__(
        self,
        paced: PacedLoop,
        read_fd: int,
        write_fd: int,
        on_message: Callable[[bytes], None],
        on_closed: Callable[[], None],
    ) -> None:
        self._paced = paced
        self._read_fd, self._write_fd = read_fd, write_fd
        self._on_message, self._on_closed = on_message, on_closed
        self._received = bytearray()
        self._unsent = bytearray()
        self._is_closed = False
        os.set_blocking(read_fd, False)
        os.set_blocking(write_fd, False)
        paced.watch(read_fd, self._on_readable)

    @property
    def has_unsent(self) -> bool:
        return bool(self._unsent)

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def send(self, message: bytes) -> None:
        if self._is_closed:
            return
        assert len(message) < MAX_MESSAGE_BYTES
        self._unsent += len(message).to_bytes(_LENGTH_BYTES, "little") + message
        self._write()

    def close(self) -> None:
        """Stop to listen; whoever opened the files closes them."""
        if not self._is_closed:
            self._is_closed = True
            self._unsent.clear()
            self._paced.unwatch(self._read_fd)
            self._paced.unwatch(self._write_fd)

    def _write(self) -> None:
        unsent = self._unsent
        try:
            while unsent:
                del unsent[: os.write(self._write_fd, unsent[:_CHUNK])]
        except BlockingIOError:
            self._paced.watch_writable(self._write_fd, self._write)
            return
        except OSError:
            unsent.clear()
        self._paced.watch_writable(self._write_fd, None)

    def _on_readable(self) -> None:
        with suppress(BlockingIOError):
            while True:
                data = os.read(self._read_fd, _CHUNK)
                if not data:
                    self._deliver()
                    self.close()
                    self._on_closed()
                    return
                self._received += data
                if len(data) < _CHUNK:
                    break
        self._deliver()

    def _deliver(self) -> None:
        for message in list(self._frames()):
            self._on_message(message)

    def _frames(self) -> Iterator[bytes]:
        received, start = self._received, 0
        while len(received) - start >= _LENGTH_BYTES:
            end = start + _LENGTH_BYTES + int.from_bytes(received[start : start + _LENGTH_BYTES], "little")
            if len(received) < end:
                break
            yield bytes(received[start + _LENGTH_BYTES : end])
            start = end
        del received[:start]
