"""The bootstrap server: registration, and what it answers."""

import json

import msgspec
import pytest

from kvreplay.connectors.mooncake.addresses import bootstrap_target, instance_of
from kvreplay.connectors.mooncake.bootstrap import BootstrapServer
from kvreplay.connectors.mooncake.structs import BootstrapAnswer, BootstrapQuery, RegisterWorkerPayload


def rank(**changes: object) -> RegisterWorkerPayload:
    fields = {"engine_id": "E", "dp_rank": 0, "tp_rank": 0, "pp_rank": 0, "addr": "tcp://P0/mooncake/0"}
    return msgspec.convert({**fields, **changes}, RegisterWorkerPayload)


def post(server: BootstrapServer, payload: RegisterWorkerPayload) -> BootstrapAnswer:
    return server.answer(BootstrapQuery("/register", msgspec.json.encode(payload)))


def test_what_is_registered_is_answered() -> None:
    server = BootstrapServer()
    for tp_rank in (0, 1):
        assert post(server, rank(tp_rank=tp_rank, addr=f"tcp://P0/mooncake/{tp_rank}")).status == 200
    answer = server.answer(BootstrapQuery("/query"))
    assert json.loads(answer.body or b"") == {
        "0": {
            "engine_id": "E",
            "worker_addr": {"0": {"0": "tcp://P0/mooncake/0"}, "1": {"0": "tcp://P0/mooncake/1"}},
        }
    }


def test_the_same_registration_twice_is_no_error() -> None:
    server = BootstrapServer()
    assert [post(server, rank()).status for _ in range(2)] == [200, 200]


@pytest.mark.parametrize(
    ("second", "detail"),
    [
        ({"engine_id": "F"}, "Engine ID mismatch for dp_rank=0: expected E, got F"),
        (
            {"addr": "tcp://P1/mooncake/0"},
            "Worker with dp_rank=0, tp_rank=0, pp_rank=0 is already registered at tcp://P0/mooncake/0, "
            "but still want to register at tcp://P1/mooncake/0",
        ),
    ],
)
def test_a_conflict_is_refused(second: dict[str, object], detail: str) -> None:
    server = BootstrapServer()
    post(server, rank())
    answer = post(server, rank(**second))
    assert (answer.status, json.loads(answer.body or b"")) == (400, {"detail": detail})


@pytest.mark.parametrize(
    ("query", "status"),
    [
        (BootstrapQuery("//query"), 404),
        (BootstrapQuery("/register"), 404),
        (BootstrapQuery("/register", b"{"), 422),
        (BootstrapQuery("/register", b'{"engine_id": 1}'), 422),
    ],
)
def test_anything_else_is_an_error_status(query: BootstrapQuery, status: int) -> None:
    assert BootstrapServer().answer(query).status == status


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://P0:8998", ("P0/bootstrap", "/query")),
        ("https://P0", ("P0/bootstrap", "/query")),
        ("http://P0:8998/", ("P0/bootstrap", "//query")),
        ("P0:8998", None),
        ("http://", None),
    ],
)
def test_where_a_url_leads(url: str, target: tuple[str, str] | None) -> None:
    assert bootstrap_target(url) == target


def test_whose_address_it_is() -> None:
    names = ["tcp://P0/mooncake/1#2", "P0/memory/0", "P0#3"]
    assert [instance_of(name) for name in names] == ["P0"] * 3
