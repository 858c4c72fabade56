"""Seeded randomness: the same in every process, part by part, key by key."""

import os
import subprocess
import sys

import pytest

from kvreplay.sim.rng import decides, generator, stable_hash

PROGRAM = "from kvreplay.sim.rng import *; print(stable_hash(7, 'x', 2), generator(7, 'part').random())"


@pytest.mark.parametrize("hash_seed", ["0", "1"])
def test_draws_do_not_depend_on_the_process(hash_seed: str) -> None:
    command = [sys.executable, "-c", PROGRAM]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    assert printed.split() == [str(stable_hash(7, "x", 2)), str(generator(7, "part").random())]


def test_parts_of_a_key_do_not_run_into_each_other() -> None:
    assert len({stable_hash("ab", "c"), stable_hash("a", "bc"), stable_hash("abc")}) == 3


def test_each_part_has_its_own_generator() -> None:
    assert generator(0, "network").random() != generator(0, "workload").random()
    assert generator(0, "network").random() != generator(1, "network").random()


@pytest.mark.parametrize("probability", [0.0, 0.02, 0.5, 1.0])
def test_a_probability_holds_over_many_keys(probability: float) -> None:
    hits = sum(decides(probability, 3, "fault", number) for number in range(20_000))
    assert hits == pytest.approx(20_000 * probability, abs=300)


def test_what_happens_at_a_low_probability_happens_at_a_higher_one() -> None:
    """So that a sweep over the probability only ever adds faults."""
    rare = {number for number in range(2_000) if decides(0.1, "key", number)}
    frequent = {number for number in range(2_000) if decides(0.2, "key", number)}
    assert rare < frequent
