"""Plan files: read like `--inject`, bounded, and refused in one line."""

from pathlib import Path

import pytest

from kvreplay.errors import ConfigError
from kvreplay.faults.plan import MAX_PLAN_BYTES, load_plan, make_plan


@pytest.fixture
def plan_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path("plan.toml")


def test_a_table_says_what_inject_says(plan_file: Path) -> None:
    plan_file.write_text(
        """
        [[fault]]
        name = "timeout"
        p = 0.02
        [[fault]]
        name = "slow"
        nth = [1, "3..4"]
        delay = "2s"
        rank = 0
        [[fault]]
        name = "abort"
        request = "a,b"
        """
    )
    assert [fault.spec for fault in load_plan(plan_file)] == [
        "timeout:p=0.02",
        "slow:nth=1,3..4,rank=0,delay=2s",
        r"abort:request=a\,b",
    ]


def test_the_files_faults_come_before_those_of_the_command_line(plan_file: Path) -> None:
    plan_file.write_text('[[fault]]\nname = "slow"')
    assert [fault.spec for fault in make_plan(["timeout"], plan_file)] == ["slow", "timeout"]
    assert [fault.origin for fault in make_plan(["timeout"], plan_file)] == [
        "plan.toml: fault 1",
        "--inject timeout",
    ]


@pytest.mark.parametrize(
    ("specs", "reason"),
    [
        (
            ["timeout", "timeout"],
            "--inject timeout: the same fault twice, it is there already; expected other keys, or ",
        ),
        (
            ["slow:p=0.5", "slow:delay=10s,p=0.5"],
            "--inject slow:delay=10s,p=0.5: the same fault twice, --inject slow:p",
        ),
        (
            ["abort", "slow:delay=2s"],
            "--inject slow:delay=2s: the same fault twice, plan.toml: fault 1 is there already",
        ),
    ],
)
def test_the_same_fault_twice_is_refused(plan_file: Path, specs: list[str], reason: str) -> None:
    """They would share their firings, and the second be reported with those of the first."""
    plan_file.write_text('[[fault]]\nname = "slow"\ndelay = "2s"')
    with pytest.raises(ConfigError) as error:
        make_plan(specs, plan_file)
    assert str(error.value).startswith(reason)


def test_faults_of_one_name_that_differ_may_stand_together() -> None:
    assert len(make_plan(["timeout:p=0.5", "timeout:p=0.5,id=b", "timeout:nth=1", "timeout"])) == 4


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "has no [[fault]] table"),
        ("fault = []", "has no [[fault]] table"),
        ("fault = 3", "fault must be [[fault]] tables"),
        ("fault = [3]", "fault must be [[fault]] tables"),
        ("[[faults]]\nname='slow'", "unknown key 'faults'; did you mean 'fault'?; expected [[fault]] tables"),
        ("[[fault]]\nname='slow'\n[[fault]]\np=1", "fault 2: needs name, a text"),
        ("[[fault]]\nnaem='slow'", "fault 1: needs name, a text; there is 'naem', did you mean 'name'?"),
        ("[[fault]]\nname='slwo'", "fault 1: no fault 'slwo'; did you mean 'slow'?"),
        ("[[fault]]\nname='slow'\ndelya='2s'", "fault 1: slow has no key 'delya'; did you mean 'delay'?"),
        ("[[fault]]\nname='slow'\ndelay=2", "fault 1: delay must be a duration such as 500ms, 2s or 1m, got '2'"),
        ("[[fault]]\nname='slow'\np=true", "fault 1: p must be a number or a text, got True"),
        ("[[fault]]\nname='slow'\np={}", "fault 1: p must be a number or a text, got {}"),
        ('[[fault]]\nname="slow"\nid="a\\nb"', "fault 1: id must be a number or a text, got 'a\\nb'"),
        (
            "[[fault]]\nname='slow'\np=2024-01-01",
            "fault 1: p must be a number or a text, got datetime.date(2024, 1, 1)",
        ),
        ("[[fault]\n", "not TOML: Expected ']]' at the end of an array declaration (at line 1, column 8)"),
        ("x=" + "[" * 10_000, "not TOML: "),
    ],
)
def test_a_mistake_names_the_file_and_the_fault(plan_file: Path, text: str, reason: str) -> None:
    plan_file.write_text(text)
    with pytest.raises(ConfigError) as error:
        load_plan(plan_file)
    message = str(error.value)
    assert message.startswith("plan.toml: ")
    assert reason in message
    assert "\n" not in message


def test_a_file_that_is_no_plan_is_refused(plan_file: Path) -> None:
    with pytest.raises(ConfigError, match=r"^plan\.toml: no such file or directory$"):
        load_plan(plan_file)
    plan_file.write_bytes(b"PAR1\xff\xff")
    with pytest.raises(ConfigError, match=r"^plan\.toml: byte 4 is not UTF-8; expected a plan in TOML$"):
        load_plan(plan_file)
    plan_file.write_bytes(b"#" * (MAX_PLAN_BYTES + 1))
    with pytest.raises(ConfigError, match=r"^plan\.toml: larger than 1048576 bytes, not a plan$"):
        load_plan(plan_file)


def test_a_plan_has_a_bounded_number_of_faults(plan_file: Path) -> None:
    plan_file.write_text("[[fault]]\nname='slow'\n" * 1001)
    with pytest.raises(ConfigError, match=r"^plan\.toml: at most 1000 faults, got 1001$"):
        load_plan(plan_file)
