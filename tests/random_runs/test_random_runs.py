"""Some of the random command lines; `python -m tests.random_runs` plays any number of others."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.random_runs.cases import draw
from tests.random_runs.checks import Shell, complaints

_LIMIT_S: Final = 300


@pytest.fixture(autouse=True)
def _ends() -> Iterator[None]:
    """A run that has no end would be no failure otherwise."""

    def too_long(*_: object) -> None:
        pytest.fail(f"takes longer than {_LIMIT_S} s")

    before = signal.signal(signal.SIGALRM, too_long)
    signal.alarm(_LIMIT_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("seed", range(4, 9))
def test_what_a_run_says_is_the_same_however_it_is_asked(seed: int, tmp_path: Path) -> None:
    assert list(complaints(draw(seed), Shell(tmp_path))) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9, 20))
def test_of_many_runs_too(seed: int, tmp_path: Path) -> None:
    assert list(complaints(draw(seed), Shell(tmp_path))) == []


def test_a_case_is_its_seed() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
