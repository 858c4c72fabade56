"""Workloads: read with their defaults, refused where they make no sense, drawn at random, and shrunk."""

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvreplay.conformance.minimise import minimised
from kvreplay.conformance.random_workloads import FEATURES, LAYOUTS, random_workload
from kvreplay.conformance.scheduler_vectors import reason_unsupported, run_workload
from kvreplay.conformance.vector import UnsupportedVectorError
from kvreplay.conformance.workload import External, read_workload
from kvreplay.errors import ConfigError

VECTORS = sorted((Path(__file__).parent / "scheduler").glob("*.json"))
PLAIN: dict[str, Any] = {"engine": {"num_gpu_blocks": 9}, "requests": [{"id": "a", "prompt": [1, 2, 3]}]}


def changed(path: str, value: object) -> dict[str, Any]:
    """PLAIN with one value at `requests.0.id` and the like; where a place is missing it is made."""
    document: Any = deepcopy(PLAIN)
    place = document
    *way, last = path.split(".")
    for step in way:
        place = place[int(step)] if isinstance(place, list) else place.setdefault(step, {})
    place[last] = value
    return dict(document)


# -- reading ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_every_vectors_workload_is_read_to_the_last_key(path: Path) -> None:
    document = json.loads(path.read_text())["workload"]
    workload = read_workload(document)
    assert [request.id for request in workload.requests] == [spec["id"] for spec in document["requests"]]
    assert all(request.prompt_token_ids for request in workload.requests)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [
        ([5, 6], [5, 6]),
        ({"ramp": [29999, 3]}, [29999, 0, 1]),
        ({"const": [7, 2]}, [7, 7]),
        ({"cat": [[1], {"cat": [{"ramp": [2, 2]}, {"const": [9, 1]}]}]}, [1, 2, 3, 9]),
    ],
)
def test_prompts_are_listed_or_described(prompt: object, tokens: list[int]) -> None:
    assert read_workload(changed("requests.0.prompt", prompt)).requests[0].prompt_token_ids == tokens


def test_a_number_of_external_tokens_stands_for_a_synchronous_load() -> None:
    number = read_workload(changed("requests.0.external", 2)).requests[0]
    record = read_workload(changed("requests.0.external", {"tokens": 2})).requests[0]
    assert record.external == External(tokens=2)
    assert number.script == record.script


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        (("requests.0.max_tokens", 2), False),
        (("requests.0.external", 2), True),
        (("requests.0.external", 0), False),
        (("requests.0.delay_free", True), True),
        (("events", [{"step": 1, "abort": ["a"]}]), False),
        (("events", [{"step": 1, "finished_sending": ["a"]}]), True),
        (("engine.connector", True), True),
    ],
)
def test_there_is_a_connector_where_something_needs_one(changes: tuple[str, object], wanted: bool) -> None:
    assert read_workload(changed(*changes)).has_connector is wanted


@pytest.mark.parametrize(
    ("path", "value", "complaint"),
    [
        ("requests.0.id", 3, "requests[0].id: expected str, got int"),
        ("requests.0.prompt", [], "requests[0].prompt: must have 1 to 10000000 tokens, got 0"),
        ("requests.0.prompt", {"ramp": [1, 10**12]}, "requests[0].prompt: must have 1 to 10000000 tokens"),
        ("requests.0.prompt", {"ramp": [1, 2], "const": [1, 2]}, "requests[0].prompt: expected exactly one of"),
        ("requests.0.prompt", {"cat": [{}]}, "requests[0].prompt: expected exactly one of"),
        ("requests.0.load", {"invalid": [[1, 0]]}, "requests[0].load.invalid: there are 1 groups"),
        ("requests", [*PLAIN["requests"], *PLAIN["requests"]], "requests[1].id: 'a' is there twice"),
        ("engine.num_gpu_blocks", 1, "engine.num_gpu_blocks: expected int >= 2"),
        ("engine.policy", "lifo", "engine.policy: invalid enum value 'lifo'"),
        ("engine.groups", [{"type": "swa"}], "engine.groups[0]: swa needs sliding_window"),
        ("events", [{"step": 1, "invalid_ids": [9]}], "events[0].invalid_ids: there are 9 blocks"),
        ("events", [{"step": 1, "invalid": [["a", 1, 0]]}], "events[0].invalid: there are 1 groups"),
        ("events", [{}], "events[0]: object missing required field step"),
    ],
)
def test_what_makes_no_sense_is_refused_with_its_place(path: str, value: object, complaint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_workload(changed(path, value))
    assert str(caught.value).startswith(f"workload: {complaint}")
    assert not isinstance(caught.value, UnsupportedVectorError)


@pytest.mark.parametrize("path", ["colour", "engine.colour", "requests.0.colour", "requests.0.load.colour"])
def test_a_key_that_nobody_reads_is_not_passed_over(path: str) -> None:
    with pytest.raises(UnsupportedVectorError, match=r"^workload\..*colour is not known here$"):
        read_workload(changed(path, 1))


# -- drawing ------------------------------------------------------------------------------------------------------


def test_a_seed_draws_one_workload() -> None:
    assert random_workload(7) == random_workload(7)
    assert random_workload(7) != random_workload(8)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_draws_workloads_that_can_be_read(layout: str) -> None:
    for seed in range(20):
        workload = read_workload(random_workload(seed, layouts=[layout]))
        kinds = [group["type"] for group in LAYOUTS[layout].groups]
        assert [group.type for group in workload.groups] == kinds
        longest = max(len(request.prompt_token_ids) for request in workload.requests)
        assert longest < workload.engine.max_model_len


def test_features_come_only_where_they_are_asked_for() -> None:
    def uses(features: tuple[str, ...]) -> Iterator[bool]:
        for seed in range(40):
            engine = read_workload(random_workload(seed, features=features)).engine
            yield engine.async_scheduling or engine.spec is not None or engine.policy == "priority"

    assert any(uses(FEATURES))
    assert not any(uses(()))


@pytest.mark.parametrize("seed", range(60))
def test_our_engine_survives_what_it_models(seed: int) -> None:
    """Whether it decides as the real one does is asked where that is installed; here it must end, and repeat."""
    document = random_workload(seed, layouts=("full", "swa"), features=())
    if reason_unsupported(read_workload(document)) is not None:
        return
    steps = list(run_workload(document))
    assert steps
    assert list(run_workload(document)) == steps


# -- shrinking ----------------------------------------------------------------------------------------------------


def test_what_does_not_matter_goes() -> None:
    big = {
        "engine": {"num_gpu_blocks": 50, "watermark": 0.1, "max_num_seqs": 8},
        "requests": [
            {"id": "a", "prompt": {"cat": [{"ramp": [1, 20]}, [1, 2]]}, "max_tokens": 9},
            {"id": "b", "prompt": {"ramp": [9, 30]}, "external": {"tokens": 12, "async": True, "defer": 3}},
        ],
        "events": [{"step": 5, "abort": ["a"]}],
    }

    def still(candidate: dict[str, Any]) -> bool:
        by_id = {spec["id"]: spec for spec in candidate["requests"]}
        return "b" in by_id and (by_id["b"].get("external") or {}).get("async", False)

    assert minimised(big, still) == {
        "engine": {"num_gpu_blocks": 2},
        "requests": [{"id": "b", "prompt": {"ramp": [9, 1]}, "external": {"tokens": 1, "async": True}}],
        "events": [],
    }


def test_what_matters_stays_however_little_it_is() -> None:
    document = random_workload(3)
    assert minimised(document, lambda candidate: candidate == document) == document


def test_a_candidate_that_is_no_workload_is_passed_over() -> None:
    document = changed("requests.0.max_tokens", 8)

    def still(candidate: dict[str, Any]) -> bool:
        if "max_tokens" not in candidate["requests"][0]:
            raise ConfigError("no workload")
        return True

    assert minimised(document, still)["requests"][0]["max_tokens"] == 1


def test_the_number_of_questions_is_bounded() -> None:
    asked: list[dict[str, Any]] = []

    def still(candidate: dict[str, Any]) -> bool:
        asked.append(candidate)
        return True

    minimised(random_workload(3), still, max_tries=5)
    assert len(asked) == 5
