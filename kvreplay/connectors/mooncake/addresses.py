"""Who listens where. An instance that restarts has new ports: its old addresses stay dead."""

import re
from typing import Final

from kvreplay.ids import InstanceId

SCHEME: Final = "tcp://"
_FIRST_RPC_PORT: Final = 17100
_RANKS_PER_INCARNATION: Final = 256
_ZMQ_PATH: Final = re.compile(r"([a-zA-Z][a-zA-Z0-9+-]*):(.*)", re.DOTALL)
_PATIENT: Final = ("tcp", "ipc", "inproc")
"""What a DEALER socket connects to without a word although nobody is there."""
_REFUSALS: Final = {"udp": "The protocol is not compatible with the socket type"}


def engine_id_of(instance: InstanceId, incarnation: int = 0) -> str:
    return f"{instance}#{incarnation}"


def instance_of(address_or_engine_id: str) -> InstanceId:
    """`P0` of `tcp://P0/mooncake/1#2`, of `P0/memory/0` and of `P0#2`."""
    return address_or_engine_id.removeprefix(SCHEME).partition("/")[0].partition("#")[0]


def refusal_of(address: object) -> str | None:
    """Why nobody can connect to what a bootstrap server gave for a worker's address, in the words of vLLM's exception.

    That may be anything. Source: make_zmq_socket and split_zmq_path (vllm/utils/network_utils.py), of which ports are
    not looked at here: names of our own have none.
    """
    if isinstance(address, str):
        if address.startswith(SCHEME) and len(address) > len(SCHEME):
            return None
    elif address:
        return f"expected string or bytes-like object, got {type(address).__name__!r}"
    path = _ZMQ_PATH.fullmatch(printable(address))
    scheme, rest = path.groups() if path is not None else ("", "")
    host = rest.removeprefix("//") if rest.startswith("//") else ""
    if not scheme or (scheme == "tcp" and not host):
        return f"Invalid zmq path: {printable(address)}"
    if scheme in _PATIENT and host:
        return None
    problem = "Invalid argument"
    if scheme not in _PATIENT and host:
        problem = _REFUSALS.get(scheme, "Protocol not supported")
    return f"{problem} (addr={address!r})"


def printable(text: object) -> str:
    """What a stranger has sent, without what no file can be written with: JSON may hold half a character."""
    return str(text).encode(errors="backslashreplace").decode()


def worker_address(instance: InstanceId, rank: int, incarnation: int = 0) -> str:
    """Where one rank of one incarnation takes pulls, replies and completions, on the bus."""
    return f"{instance}/mooncake/{rank}" + (f"#{incarnation}" if incarnation else "")


def rpc_port(rank: int, incarnation: int = 0) -> int:
    """The port of a rank's transfer engine, which with the host name says whose memory a write means."""
    return _FIRST_RPC_PORT + rank % _RANKS_PER_INCARNATION + _RANKS_PER_INCARNATION * (incarnation % 128)


def memory_address(instance: InstanceId, port: int) -> str:
    """Where writes to this transfer engine go on the bus."""
    return f"{instance}/memory/{(port - _FIRST_RPC_PORT) % _RANKS_PER_INCARNATION}"


def registration_address(instance: InstanceId, rank: int, incarnation: int = 0) -> str:
    """Where one rank hears from the bootstrap server that it registers with."""
    return f"{instance}/register/{rank}" + (f"#{incarnation}" if incarnation else "")


def bootstrap_address(instance: InstanceId) -> str:
    return f"{instance}/bootstrap"


def bootstrap_url(instance: InstanceId, port: int = 8998) -> str:
    """What a proxy gives a consumer as `remote_bootstrap_addr`."""
    return f"http://{instance}:{port}"


def bootstrap_target(url: str) -> tuple[str, str] | None:
    """The bus address and path that GET `url` + "/query" means, or None if no HTTP client would send it."""
    for scheme in ("http://", "https://"):
        if url.startswith(scheme):
            authority, slash, path = url.removeprefix(scheme).partition("/")
            host = authority.partition(":")[0]
            return (bootstrap_address(host), slash + path + "/query") if host else None
    return None
