"""Vectors with one value missing or replaced: broken in one line, different, or the same, but never a traceback."""

import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any, Final

import pytest

from kvreplay.cli.app import run_app
from kvreplay.conformance.suite import replay_vector
from kvreplay.conformance.vector import read_vector
from kvreplay.errors import ConfigError

HERE: Final = Path(__file__).parent
VECTORS: Final = (
    "scheduler/37_failed_recving_recompute.json",
    "simple_cpu/vectors/there_and_back.json",
    "offload/vectors/01_store_load.json",
    "offload/managers/lru_06_failed_store.json",
    "offload/alloc/alloc.json",
    "mooncake/vectors/ok_p_first.json",
    "mooncake/vectors/f04_404.json",
    "mooncake/vectors/s_abort_p_waiting.json",
    "mooncake/more/answer_forged.json",
    "mooncake/fixtures.json",
)
"""One of each form, and of transcripts one for each kind of rule and both kinds of scheduler."""
VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    -1,
    0,
    3.5,
    1 << 40,
    -(1 << 40),
    "",
    "zz",
    [],
    [None],
    {},
    {"a": 1},
    [[1]],
)
NUM_MUTATIONS: Final = 30
NOTHING: Final = object()


def mutations(text: str, rng: Random) -> Iterator[tuple[str, Any]]:
    """Where something was changed and into what, and the changed document. Each key is as likely as its neighbours,
    whatever is below it."""
    for number in range(NUM_MUTATIONS):
        document = node = json.loads(text)
        path = []
        while True:
            path.append(rng.choice(list(node) if isinstance(node, dict) else range(len(node))))
            child = node[path[-1]]
            if not (isinstance(child, dict | list) and child and rng.random() < 0.8):
                break
            node = child
        value = NOTHING if number % 2 else rng.choice(VALUES)
        if value is NOTHING:
            del node[path[-1]]
        else:
            node[path[-1]] = value
        yield f"{'.'.join(map(str, path))} {'gone' if value is NOTHING else repr(value)}", document


@pytest.mark.parametrize("name", VECTORS)
def test_a_mutilated_vector_fails_as_a_broken_one_if_at_all(name: str, tmp_path: Path) -> None:
    text = (HERE / name).read_text()
    path = tmp_path / "x.json"
    results = []
    for what, document in mutations(text, Random(f"{name} 1")):
        path.write_text(json.dumps(document))
        try:
            vector = read_vector(path)
            outcome = None if vector is None else replay_vector(vector)
        except ConfigError as error:
            results.append("broken")
            if "\n" in str(error):
                raise AssertionError(f"more than one line: {what}") from error
            continue
        except Exception as bug:
            raise AssertionError(what) from bug
        bugs = [each.got for each in outcome.differences if each.field == "bug"] if outcome is not None else []
        assert not bugs, what
        results.append("no vector" if outcome is None else outcome.result.value)
    assert "broken" in results
    assert len(set(results)) > 1, "it changes more than what breaks it"


def test_a_recorded_event_without_a_field_is_broken_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads((HERE / "mooncake/more/req_delay_over.json").read_text())
    del document["events"][1]["call"]
    path = tmp_path / "x.json"
    path.write_text(json.dumps(document))
    assert run_app(["conformance", str(path)]) == 2
    out = "".join(capsys.readouterr())
    assert f"{path}" in out
    assert "events[1]: Object missing required field `call`" in out


@pytest.mark.parametrize("number", [str(1 << 64), "9" * 5000, "1e999", "NaN"])
def test_a_number_beyond_all_engines_is_broken(number: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(f'{{"oracle": "vllm 0.33.0", "workload": {number}}}')
    with pytest.raises(ConfigError, match=r"^no engine counts so far: "):
        read_vector(path)
