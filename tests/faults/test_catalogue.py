"""The catalogue: every row complete, every verb in use, and all of it printed."""

import json
import re
from pathlib import Path

import pytest

from kvreplay.cli.app import run_app
from kvreplay.errors import ConfigError
from kvreplay.faults import verbs
from kvreplay.faults.catalogue import catalogue, find_rows
from kvreplay.faults.registry import VERBS, settings_of
from kvreplay.faults.spec import COMMON_KEYS, default_of, keys_of, parse_spec, write_setting
from kvreplay.faults.verb import ActionVerb, MessageVerb
from kvreplay.sim.catalogue import FaultRow

ROWS = list(catalogue().values())
SHORT_NAMES = [
    "timeout",
    "error-response",
    "partial-error",
    "bootstrap-failure",
    "slow",
    "corrupt",
    "abort",
    "peer-crash",
]


def test_short_names_come_first_in_the_order_of_the_table() -> None:
    assert list(catalogue())[: len(SHORT_NAMES)] == SHORT_NAMES
    assert [row.name for row in ROWS if row.short_name] == SHORT_NAMES


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_row_is_documented_and_can_be_built(row: FaultRow) -> None:
    assert re.fullmatch(r"[a-z]+(-[a-z]+)*(\.[a-z]+(-[a-z]+)*)?", row.name)
    assert row.models
    assert row.survives
    assert parse_spec(row.name).spec == row.name
    for name, setting in settings_of(row).items():
        assert setting.doc, name
        written = write_setting(setting, default_of(setting))
        assert parse_spec(f"{row.name}:{name}={written}").settings[name] == default_of(setting)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_a_rows_target_is_of_its_verbs_sort(row: FaultRow) -> None:
    verb = VERBS[row.verb]
    if isinstance(verb, MessageVerb):
        assert "." in row.target
    elif isinstance(verb, ActionVerb):
        assert row.target in (("client", "instance", "producer") if verb.acts_on_requests else ("instance",))
    elif verb.name == "startup":
        assert row.target in ("instance", "producer")
    else:
        assert row.target == verb.name


def test_every_verb_has_a_file_of_its_name_and_a_row() -> None:
    files = {path.stem.replace("_", "-") for path in Path(verbs.__path__[0]).glob("[!_]*.py")}
    assert set(VERBS) == files == {row.verb for row in ROWS}


def test_an_unknown_name_brings_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"^no fault 'mooncake\.resp-lots'; did you mean 'mooncake\.resp-lost'\?$"):
        find_rows("mooncake.resp-lots")


# -- the command -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [80, 120])
def test_the_printed_catalogue_fits_and_says_everything(
    columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert run_app(["faults"]) == 0
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= columns
    words = " ".join(printed.split())
    for row in ROWS:
        assert row.name in printed
        for name, setting in settings_of(row).items():
            assert f"{name}={write_setting(setting, default_of(setting))}" in words
    for key in COMMON_KEYS:
        assert re.search(rf"^{key} ", printed, re.MULTILINE)


def test_one_fault_alone_is_printed_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["faults", "slow"]) == 0
    printed = capsys.readouterr().out
    assert "delay=10s" in printed
    assert "timeout" not in printed


@pytest.mark.parametrize(("name", "needs"), [("slow", "the mooncake connector"), ("peer-crash", "nothing: any")])
def test_one_fault_alone_says_its_keys_and_what_it_needs(
    name: str, needs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["faults", name]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith(f"needs {needs}") for line in lines)
    said = [line.split()[1].removesuffix(":") for line in lines if line.startswith("key ")]
    assert said == [key for key in COMMON_KEYS if key in keys_of(catalogue()[name])]


def test_the_faults_of_a_part_are_listed_by_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["faults", "offload", "--json"]) == 0
    listed = [fault["name"] for fault in json.loads(capsys.readouterr().out)["faults"]]
    assert listed == [name for name in catalogue() if name.startswith("offload.")]
    assert run_app(["faults", "offload"]) == 0
    assert capsys.readouterr().out.startswith("Offload\n")


def test_json_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["faults", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [fault["name"] for fault in document["faults"]] == list(catalogue())
    slow = next(fault for fault in document["faults"] if fault["name"] == "slow")
    assert slow["settings"]["delay"] == {
        "default": "10s",
        "unit": "duration",
        "choices": [],
        "meaning": "how much longer it takes",
    }
    assert set(document["keys"]) == set(COMMON_KEYS)
    assert set(document["verbs"]) == set(VERBS)


def test_an_unknown_fault_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["faults", "tmeout"]) == 2
    assert capsys.readouterr().err == "error: no fault 'tmeout'; did you mean 'timeout'?\n"
