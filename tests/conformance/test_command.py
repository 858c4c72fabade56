"""`kvreplay conformance`: what it reads, what it prints, how it exits."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from kvreplay.cli.app import run_app

ROOT = Path(__file__).parents[2]
VECTOR = json.loads((Path(__file__).parent / "scheduler" / "04_preempt_pressure.json").read_text())
MOONCAKE = Path(__file__).parent / "mooncake" / "vectors" / "ok_p_first.json"
ORACLE = "vllm 0.33.0"

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a vector, changed in some top-level keys, under a name; returns the folder."""

    def write(name: str = "x.json", /, **changes: Any) -> Path:  # noqa: ANN401
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({**deepcopy(VECTOR), **changes}))
        return tmp_path

    return write


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, str, str]]:
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: object) -> tuple[int, str, str]:
        status = run_app(["conformance", *map(str, arguments)])
        return (status, *capsys.readouterr())

    return run


Command = Callable[..., tuple[int, str, str]]


def differing_steps() -> list[dict[str, Any]]:
    steps: list[dict[str, Any]] = deepcopy(VECTOR["steps"])
    steps[3]["after"]["fq"].reverse()
    return steps


# -- over sockets -------------------------------------------------------------------------------------------------


def test_over_sockets_what_has_no_messages_is_counted_and_skipped(command: Command, write: Write) -> None:
    status, out, _ = command(write("a.json"), MOONCAKE, "--transport", "zmq")
    assert status == 0
    assert out.splitlines() == [
        "skipped  1 scheduler vector  nothing in it crosses a socket",
        "vllm 0.33.0: 1 of 2 vectors equal, 0 differ, 1 skipped",
    ]


def test_an_unknown_transport(command: Command, write: Write) -> None:
    status, _, err = command(write(), "--transport", "tcp")
    assert (status, err) == (2, "error: --transport tcp: expected one of virtual, zmq\n")


# -- what it prints -----------------------------------------------------------------------------------------------


def test_the_projects_own_vectors_are_the_default_and_none_differs(
    command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    status, out, _ = command()
    assert status == 0
    assert "differs" not in out
    assert out.splitlines()[-1].startswith(f"{ORACLE}: ")
    assert ", 0 differ, " in out.splitlines()[-1]


def test_equal_vectors_are_only_counted(command: Command, write: Write) -> None:
    assert command(write()) == (0, f"{ORACLE}: 1 of 1 vectors equal, 0 differ, 0 skipped\n", "")


@pytest.mark.parametrize("flag", ["-v", "--all"])
def test_or_listed_on_demand(command: Command, write: Write, flag: str) -> None:
    _, out, _ = command(write(), flag)
    assert out.splitlines()[0].startswith("equal    ")
    assert out.splitlines()[0].endswith("x.json")


def test_a_difference_is_shown_side_by_side_where_it_first_shows(command: Command, write: Write) -> None:
    folder = write(steps=differing_steps())
    status, out, _ = command(folder)
    assert status == 3
    assert out == (
        f"differs  {folder / 'x.json'}  step 3\n"
        "    field     expected  got\n"
        "    after.fq  [9, 10]   [10, 9]\n"
        f"{ORACLE}: 0 of 1 vectors equal, 1 differ, 0 skipped\n"
    )


@pytest.mark.parametrize("width", [80, 120])
def test_long_values_are_folded_into_the_width(
    command: Command, write: Write, monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    workload = {**VECTOR["workload"], "engine": {**VECTOR["workload"]["engine"], "num_gpu_blocks": 60}}
    folder = write(workload=workload)
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = command(folder)
    assert out.count("after.fq") == 1
    assert len(out.splitlines()) > 5
    assert max(len(line) for line in out.splitlines()[1:]) <= width


def test_an_engine_that_fails_over_a_vector_is_a_difference(
    command: Command, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: object) -> None:
        raise AssertionError("block 3 released twice")

    monkeypatch.setattr("kvreplay.engine.scheduler.Scheduler.schedule", fail)
    status, out, _ = command(write())
    assert status == 3
    assert "AssertionError: block 3 released twice (test_command.py:" in " ".join(out.split())


def test_each_oracle_has_its_line(command: Command, write: Write) -> None:
    write("b.json", oracle="vllm 0.34.0")
    _, out, _ = command(write("a.json"))
    assert out.splitlines() == [
        "vllm 0.33.0: 1 of 1 vectors equal, 0 differ, 0 skipped",
        "vllm 0.34.0: 1 of 1 vectors equal, 0 differ, 0 skipped",
    ]


# -- what it skips and what it ignores ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"workload": None, "scenario": {"do": [], "P": {"async_scheduling": True}}, "events": [], "final": {}},
            "async_scheduling",
        ),
        ({"format": 2}, "format 2"),
        ({"workload": {**VECTOR["workload"], "weather": "wet"}}, "workload.weather is not known here"),
    ],
)
def test_what_is_not_modelled_is_skipped_with_its_reason(
    command: Command, write: Write, changes: dict[str, Any], reason: str
) -> None:
    given = {name: value for name, value in {**VECTOR, **changes}.items() if value is not None}
    folder = write()
    (folder / "x.json").write_text(json.dumps(given))
    assert command(folder) == (
        0,
        f"skipped  {folder / 'x.json'}  {reason}\n{ORACLE}: 0 of 1 vectors equal, 0 differ, 1 skipped\n",
        "",
    )


def test_a_transcript_in_json_lines_is_known_by_its_head(command: Command, tmp_path: Path) -> None:
    whole = json.loads((Path(__file__).parent / "mooncake" / "vectors" / "ok_p_first.json").read_text())
    events, final = whole.pop("events"), whole.pop("final")
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, [whole, *events, {"final": final}])))
    assert command(tmp_path) == (0, f"{ORACLE}: 1 of 1 vectors equal, 0 differ, 0 skipped\n", "")


@pytest.mark.parametrize("document", [[1, 2], {}, 7, {"engine": {}, "requests": []}, {"steps": []}])
def test_json_that_is_no_vector_is_ignored(command: Command, write: Write, document: object) -> None:
    folder = write()
    (folder / "other.json").write_text(json.dumps(document))
    assert command(folder, "-v")[1].count("\n") == 2


def test_folders_are_searched_through_and_a_file_is_counted_once(command: Command, write: Write) -> None:
    folder = write("deep/er/x.json")
    (folder / "notes.txt").write_text("{")
    write(".hidden/x.json")
    _, out, _ = command(folder, folder / "deep", folder / "deep/er/x.json")
    assert out == f"{ORACLE}: 1 of 1 vectors equal, 0 differ, 0 skipped\n"


# -- what it refuses ----------------------------------------------------------------------------------------------


def one_line(text: str) -> str:
    (line,) = text.splitlines()
    return line


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"oracle": "vllm 0.33.0", "work', "no JSON: line 1: unterminated string"),
        ("", "no JSON: line 1: expecting value"),
        ('{"a": 1}\n{"b": ', "no JSON: line 2: expecting value"),
        ("[" * 100_000, "no JSON that can be read: it is nested too deeply"),
        (json.dumps({**VECTOR, "oracle": 3}), "oracle: expected the name of an engine, got 3"),
        (json.dumps({**VECTOR, "steps": []}), "steps: expected a list of steps"),
        (json.dumps({**VECTOR, "steps": VECTOR["steps"][1:]}), "steps[0]: expected an object with k 0"),
        (json.dumps({**VECTOR, "workload": [1]}), "workload: expected object, got array"),
        (json.dumps({**VECTOR, "workload": {"engine": {}, "requests": []}}), None),
    ],
)
def test_a_broken_vector_is_one_line_that_names_it(
    command: Command, tmp_path: Path, text: str, complaint: str | None
) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    status, out, err = command(path)
    assert (status, out) == (2, "")
    assert one_line(err).startswith(f"error: {path}: {complaint or 'workload: engine: '}")


def test_what_is_not_text_is_refused_too(command: Command, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b"{\xff}")
    assert one_line(command(tmp_path)[2]) == f"error: {tmp_path / 'x.json'}: no JSON: byte 1 is not UTF-8"


def test_a_broken_vector_hides_no_difference_beside_it(command: Command, write: Write) -> None:
    folder = write("b.json", steps=differing_steps())
    (folder / "a.json").write_text("{")
    status, out, err = command(folder)
    assert status == 3
    assert "b.json  step 3" in out
    assert "a.json: no JSON" in one_line(err)


def test_no_vectors_at_all_is_a_mistake(command: Command, tmp_path: Path) -> None:
    assert command(tmp_path) == (2, "", f"error: {tmp_path}: no vectors found\n")


def test_a_place_that_is_not_there_is_a_mistake(command: Command, tmp_path: Path) -> None:
    assert command(tmp_path / "x") == (2, "", f"error: {tmp_path / 'x'}: no such file or folder\n")


def test_outside_of_the_project_a_place_must_be_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = command()
    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: name a file or a folder of vectors")


def test_a_profile_that_is_not_there_is_answered_with_those_that_are(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, err = command("--check", "nosuch")
    assert (status, out) == (2, "")
    assert one_line(err).startswith("error: --check nosuch: unknown profile, expected one of vllm-0.33, pre-50388, ")


# -- JSON ---------------------------------------------------------------------------------------------------------


def test_json_says_the_same(command: Command, write: Write) -> None:
    folder = write(steps=differing_steps())
    status, out, _ = command(folder, "--json")
    assert status == 3
    assert json.loads(out) == {
        "exit_status": 3,
        "oracles": [{"oracle": ORACLE, "vectors": 1, "equal": 0, "differ": 1, "skipped": 0}],
        "vectors": [
            {
                "file": str(folder / "x.json"),
                "kind": "scheduler",
                "oracle": ORACLE,
                "result": "differs",
                "reason": None,
                "step": 3,
                "differences": [{"field": "after.fq", "expected": [9, 10], "got": [10, 9]}],
                "findings": [],
            }
        ],
    }


def test_json_names_what_is_broken(command: Command, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text("{")
    status, out, err = command(tmp_path, "--json")
    (vector,) = json.loads(out)["vectors"]
    assert status == 2
    assert vector["result"] == "broken"
    assert vector["reason"] in err


# -- with checkers on ---------------------------------------------------------------------------------------------


HAZARD = ROOT / "tests" / "conformance" / "scheduler" / "81_hazard_recompute_hit_before_rewrite.json"


def test_laws_that_a_workload_breaks_are_listed_and_do_not_count(command: Command) -> None:
    status, out, _ = command(HAZARD, "--check", "vllm-0.33")
    assert status == 0
    assert "  CONTENT  step 1, c, block 6, group 0: read wrong contents from position 20 on\n" in out
    assert "CONTENT" not in command(HAZARD, "--check", "ideal")[1]


def test_findings_are_in_the_document(command: Command) -> None:
    (vector,) = json.loads(command(HAZARD, "--check", "vllm-0.33", "--json")[1])["vectors"]
    assert vector["result"] == "equal"
    (finding,) = vector["findings"]
    assert (finding["checker"], finding["request_id"], finding["block_id"]) == ("CONTENT", "c", 6)


def test_an_unknown_profile_names_the_flag(command: Command) -> None:
    status, _, err = command(HAZARD, "--check", "idel")
    assert (status, err) == (2, "error: --check idel: unknown profile; did you mean 'ideal'?\n")
