"""Where instances' processes come from: one that has imported everything, once, and forks.

    python -m kvreplay.replay.remote.nursery FD

FD is a Unix socket. Each message brings the three files of a child (`Files`). When the socket is closed, the nursery
waits for its children, which end when their pipes do, and then ends those that have not.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import traceback
from contextlib import suppress
from time import monotonic, sleep
from typing import Final, NamedTuple

from kvreplay.kv.torch_import import import_torch
from kvreplay.replay.remote.instance_process import Child
from kvreplay.transport.paced import shared_instant

_GOODBYE_S: Final = 3.0
_POLL_S: Final = 0.002
_BIRTH: Final = b"\x01"


class Files(NamedTuple):
    """What a child is born with: where it hears its supervisor, where it answers, and the clock."""

    read_fd: int
    write_fd: int
    clock_fd: int


class Nursery:
    """The supervisor's side."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", __name__, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )

    def bear(self, files: Files) -> None:
        """Have a child born with these files, which stay open here. A nursery that has died bears none: whoever waits
        at the other end of the child's pipes hears that they are closed."""
        with suppress(OSError):
            socket.send_fds(self._socket, [_BIRTH], files)

    def close(self) -> None:
        """The children are gone when this returns."""
        self._socket.close()
        try:
            self._process.wait(2 * _GOODBYE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(fd: int) -> int:
    # A terminal's Ctrl-C is for the supervisor, which then closes the socket and the pipes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.stderr is not None:  # who prints does so to stderr: stdout is the supervisor's
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    import_torch()
    gc.collect()
    gc.freeze()  # shared with all children, as long as nobody writes into it
    children: list[int] = []
    with socket.socket(fileno=fd) as births:
        while True:
            message, fds, _, _ = socket.recv_fds(births, len(_BIRTH), len(Files._fields))
            if not message:
                break
            files = Files(*fds)
            child = os.fork()
            if child == 0:
                births.close()
                _live(files)
            children.append(child)
            for file in files:
                os.close(file)
    _see_off(children)
    return 0


def _live(files: Files) -> None:
    """What is left of a child's life. It does not come back."""
    status = 1
    try:
        status = Child(files.read_fd, files.write_fd, shared_instant(files.clock_fd)).run()
    except BaseException:  # whatever it was, a second nursery must not come of it
        traceback.print_exc()
    finally:
        os._exit(status)


def _see_off(children: list[int]) -> None:
    end_s = monotonic() + _GOODBYE_S
    while children := [child for child in children if os.waitpid(child, os.WNOHANG)[0] == 0]:
        if monotonic() > end_s:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return
        sleep(_POLL_S)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
