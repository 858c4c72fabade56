"""Some of the random command lines; `python -m tests.random_runs` plays any number of others."""

from pathlib import Path

import pytest

from tests.random_runs.cases import draw
from tests.random_runs.checks import Shell, complaints


@pytest.mark.parametrize("seed", range(3, 9))
def test_what_a_run_says_is_the_same_however_it_is_asked(seed: int, tmp_path: Path) -> None:
    assert list(complaints(draw(seed), Shell(tmp_path))) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(9, 30))
def test_of_many_runs_too(seed: int, tmp_path: Path) -> None:
    assert list(complaints(draw(seed), Shell(tmp_path))) == []


def test_a_case_is_its_seed() -> None:
    assert draw(7) == draw(7)
    assert draw(7) != draw(8)
