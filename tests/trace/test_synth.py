"""Synthetic workloads."""

import os
import statistics
import subprocess
import sys
from collections import Counter
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvreplay.cli.app import run_app
from kvreplay.errors import ConfigError
from kvreplay.kv.content_index import ContentIndex
from kvreplay.trace.lengths import Empirical, Fixed, Lengths, Lognormal, drawer, parse_lengths, written
from kvreplay.trace.reader import read_trace
from kvreplay.trace.schema import TraceMetadata
from kvreplay.trace.synth import ArrivalProcess, SynthOptions, synthesise
from kvreplay.trace.workload import Workload, read_workload, write_workload

ROOT = Path(__file__).parents[2]


def gaps_s(workload: Workload) -> list[float]:
    return [(after.time_ns - before.time_ns) / 1e9 for before, after in pairwise(workload.arrivals)]


def test_constant_arrivals_are_equally_far_apart() -> None:
    workload = synthesise(SynthOptions(requests=5, arrivals=ArrivalProcess.CONSTANT, rate=4))
    assert gaps_s(workload) == [0.25] * 4


@pytest.mark.parametrize(("arrivals", "variation"), [(ArrivalProcess.POISSON, 1.0), (ArrivalProcess.BURSTY, 2.0)])
def test_random_arrivals_have_the_rate_and_the_burstiness_asked_for(arrivals: ArrivalProcess, variation: float) -> None:
    workload = synthesise(SynthOptions(requests=4000, arrivals=arrivals, rate=5, burstiness=0.25))
    gaps = gaps_s(workload)
    assert statistics.fmean(gaps) == pytest.approx(1 / 5, rel=0.1)
    assert statistics.stdev(gaps) / statistics.fmean(gaps) == pytest.approx(variation, rel=0.1)


def test_lognormal_lengths_have_the_median_and_the_maximum_asked_for() -> None:
    workload = synthesise(SynthOptions(requests=2000, prompt=Lognormal(500, 1.0, 2000), output=Fixed(7)))
    prompts = [arrival.prompt_tokens for arrival in workload.arrivals]
    assert statistics.median(prompts) == pytest.approx(500, rel=0.1)
    assert max(prompts) == 2000
    assert {arrival.output_tokens for arrival in workload.arrivals} == {7}


@pytest.mark.parametrize("turns", [Fixed(1), Lognormal(2, 1000)])
def test_lengths_beyond_any_float_are_the_limit(turns: Any) -> None:  # noqa: ANN401
    wide = Lognormal(100, 1000)
    workload = synthesise(SynthOptions(requests=50, prompt=wide, output=wide, turns=turns))
    lengths = {arrival.prompt_tokens + arrival.output_tokens for arrival in workload.arrivals}
    assert len(workload.arrivals) == 50
    assert max(lengths) == 32_768
    drawn = Random(0)
    draw = drawer(Lognormal(100, 1000, max=7), drawn)
    assert sorted({draw() for _ in range(99)}) == [1, 7]


def test_lengths_from_one_trace_are_drawn_in_pairs(small_trace: Path, small_workload: Workload) -> None:
    pairs = {(arrival.prompt_tokens, arrival.output_tokens) for arrival in small_workload.arrivals}
    lengths = Empirical(small_trace)
    workload = synthesise(SynthOptions(requests=100, prompt=lengths, output=lengths))
    assert {(arrival.prompt_tokens, arrival.output_tokens) for arrival in workload.arrivals} == pairs


def test_a_system_prompt_is_shared_by_those_who_have_it() -> None:
    workload = synthesise(
        SynthOptions(requests=60, system_prompts=3, system_tokens=100, prompt=Fixed(28), hash_tokens=16)
    )
    index = ContentIndex(workload.arrivals, 16)
    prefixes = {tuple(index.content(place).block_keys[:6].tolist()) for place in range(60)}
    tails = {int(index.content(place).block_keys[6]) for place in range(60)}
    assert len(prefixes) == 3
    assert len(tails) == 60


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 99), block_size=st.sampled_from([1, 8, 16]), hash_tokens=st.sampled_from([5, 16]))
def test_each_turn_contains_the_turn_before_it_with_its_output(seed: int, block_size: int, hash_tokens: int) -> None:
    options = SynthOptions(
        requests=30,
        seed=seed,
        turns=Lognormal(3, 0.5),
        prompt=Lognormal(40, 1),
        output=Lognormal(20, 1),
        system_prompts=2,
        system_tokens=33,
        think_s=1,
        hash_tokens=hash_tokens,
    )
    workload = synthesise(options)
    index = ContentIndex(workload.arrivals, block_size)
    last_turn: dict[str, int] = {}
    for place, arrival in enumerate(workload.arrivals):
        session = arrival.params["session"]
        if session in last_turn:
            before = last_turn[session]
            assert arrival.params["turn"] == workload.arrivals[before].params["turn"] + 1
            whole = index.content(before).block_keys.tolist()
            assert index.content(place).block_keys[: len(whole)].tolist() == whole
        last_turn[session] = place
    assert len(last_turn) < 30


def test_a_session_ends_before_it_outgrows_the_context() -> None:
    workload = synthesise(
        SynthOptions(requests=40, turns=Fixed(100), prompt=Fixed(300), output=Fixed(100), max_tokens=1000)
    )
    assert max(arrival.prompt_tokens + arrival.output_tokens for arrival in workload.arrivals) == 800
    assert {arrival.params["turn"] for arrival in workload.arrivals} == {0, 1}


def test_arrivals_come_in_order_and_aborts_after_them() -> None:
    workload = synthesise(SynthOptions(requests=300, turns=Fixed(3), think_s=5, abort=0.3))
    times = {arrival.request_id: arrival.time_ns for arrival in workload.arrivals}
    assert list(times.values()) == sorted(times.values())
    assert len(workload.aborts) == pytest.approx(90, rel=0.3)
    assert all(abort.time_ns >= times[abort.request_id] for abort in workload.aborts)


def test_one_more_ingredient_leaves_the_other_draws_as_they_were() -> None:
    plain = synthesise(SynthOptions(requests=50))
    seasoned = synthesise(SynthOptions(requests=50, abort=0.5, system_prompts=2, system_tokens=10))
    for one, other in zip(plain.arrivals, seasoned.arrivals, strict=True):
        assert (one.time_ns, one.prompt_tokens + 10, one.output_tokens) == (
            other.time_ns,
            other.prompt_tokens,
            other.output_tokens,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"requests": 0}, "--requests 0: expected 1 to 10000000$"),
        ({"rate": float("nan")}, "--rate nan: expected 1e-06 to 1000000$"),
        ({"abort": 1.5}, "--abort 1.5: expected 0 to 1$"),
        ({"abort_after_s": -1.0}, "--abort-after -1: expected 0 to 1000000$"),
        ({"system_prompts": 3}, "--system-prompts and --system-tokens: one needs the other$"),
        ({"system_prompts": 1, "system_tokens": 40_000}, "--system-tokens 40000: no room left below --max-tokens"),
    ],
)
def test_impossible_options_name_their_flag(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        SynthOptions(**changes)


@pytest.mark.parametrize("lengths", [Fixed(5), Lognormal(100, 0.6), Lognormal(10.5, 1, 99), Empirical(Path("a:b"))])
def test_what_a_trace_says_of_its_lengths_can_be_given_again(lengths: Lengths) -> None:
    settings = {name: value for name, value in asdict(lengths).items() if value is not None}
    described = {"trace": "a:b"} if isinstance(lengths, Empirical) else {type(lengths).__name__.lower(): settings}
    assert parse_lengths("--prompt", written(described)) == lengths


@pytest.mark.parametrize(
    ("text", "lengths"),
    [
        ("12", Fixed(12)),
        ("fixed:12", Fixed(12)),
        ("lognormal:median=10,sigma=0.5", Lognormal(10, 0.5)),
        ("lognormal:sigma=1,median=10,max=99", Lognormal(10, 1, 99)),
        ("trace:a:b.parquet", Empirical(Path("a:b.parquet"))),
    ],
)
def test_lengths_are_written_as(text: str, lengths: object) -> None:
    assert parse_lengths("--prompt", text) == lengths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "fixed is '0', expected a whole number from 1 to 16777216$"),
        ("1.5", "fixed is '1.5', expected a whole number"),
        ("gauss:1", "expected N, fixed:N, "),
        ("lognorml:median=1", r"expected N, .*; did you mean 'lognormal'\?$"),
        ("lognormal:median=1", "sigma is missing, "),
        ("lognormal:median=1,sigma=x", "sigma is 'x', expected a number from 0"),
        ("lognormal:median=1,sgma=1", r"'sgma=1' is no setting of lognormal; did you mean 'sigma'\?$"),
        ("trace:", r"expected N, fixed:N, lognormal:.*\] or trace:TRACE$"),
        ("lognormal", "expected N, fixed:N, lognormal:median=N,sigma=X"),
        ("lognormal:", "median is missing, expected N, "),
        ("uniform", "expected N, fixed:N, "),
        ("fixd", r"expected N, .*; did you mean 'fixed'\?$"),
        ("-5", "fixed is '-5', expected a whole number from 1 "),
    ],
)
def test_bad_lengths_name_their_flag(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"^--prompt {text}: {message}"):
        parse_lengths("--prompt", text)


# -- the command --------------------------------------------------------------------------------------------------


def test_the_command_takes_every_ingredient(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    flags = (
        "--requests 40 --arrivals bursty --rate 3 --turns 2 --system-prompts 2 --system-tokens 64 --abort 0.2 --seed 5"
    )
    assert run_app(["synth", "-o", str(path), *flags.split()]) == 0
    trace = read_trace(path)
    assert trace.metadata.source["tool"] == "kvreplay synth"
    assert trace.metadata.source["options"]["seed"] == 5
    assert len(read_workload(trace).arrivals) == 40


def test_the_command_and_its_options_have_the_same_defaults(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    assert run_app(["synth", "-o", str(path)]) == 0
    assert read_trace(path).metadata.source == SynthOptions().metadata().source


def test_an_option_that_cannot_be_is_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["synth", "-o", str(tmp_path / "s.parquet"), "--rate", "0"]) == 2
    assert capsys.readouterr().err == "error: --rate 0: expected 1e-06 to 1000000\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--burstiness 0.1", "--burstiness 0.1: has no effect without --arrivals bursty"),
        ("--arrivals constant --burstiness 0.1", "--burstiness 0.1: has no effect without --arrivals bursty"),
        ("--think 3", "--think 3: has no effect without --turns"),
        ("--turns fixed:1 --think 3", "--think 3: has no effect without --turns"),
        ("--rate 1e-6 --requests 20000", "--rate 1e-06: request 955 would arrive after 1,002,055,773 s"),
        ("--abort-after 9", "--abort-after 9: has no effect without --abort"),
        ("--prompt trace:multi-tur", "multi-tur: no such file, nor a canned trace ("),
    ],
)
def test_an_option_without_effect_is_one_line_and_status_2(
    arguments: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["synth", "-o", str(tmp_path / "out.parquet"), *arguments.split()]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not list(tmp_path.iterdir())


def test_lengths_may_come_from_a_canned_trace(tmp_path: Path) -> None:
    out = tmp_path / "out.parquet"
    drawn = ["--prompt", "trace:multi-turn", "--output", "trace:multi-turn.parquet"]
    assert run_app(["synth", "-o", str(out), "--requests", "9", *drawn]) == 0
    canned = read_workload(read_trace(ROOT / "traces" / "multi-turn.parquet"))
    pairs = {(arrival.prompt_tokens, arrival.output_tokens) for arrival in canned.arrivals}
    assert {
        (arrival.prompt_tokens, arrival.output_tokens) for arrival in read_workload(read_trace(out)).arrivals
    } <= pairs


def test_processes_with_different_hash_seeds_make_the_same_file(tmp_path: Path) -> None:
    for seed in ("0", "1"):
        subprocess.run(
            [sys.executable, "-m", "kvreplay", "synth", "-o", tmp_path / seed, "--turns", "3", "--abort", "0.1"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=ROOT,
            check=True,
            capture_output=True,
        )
    assert (tmp_path / "0").read_bytes() == (tmp_path / "1").read_bytes()


def test_turns_from_a_trace_are_those_of_its_sessions(tmp_path: Path) -> None:
    """What a request names no session in is one of one turn."""
    chat = tmp_path / "chat.parquet"
    write_workload(chat, synthesise(SynthOptions(requests=60, turns=Fixed(3), think_s=0.01)), TraceMetadata(source={}))
    single = tmp_path / "single.parquet"
    write_workload(single, synthesise(SynthOptions(requests=60)), TraceMetadata(source={}))
    for file, turns in ((chat, 3), (single, 1)):
        made = synthesise(SynthOptions(requests=30, turns=Empirical(file), think_s=0.01))
        sessions = Counter(arrival.params.get("session", arrival.request_id) for arrival in made.arrivals)
        assert max(sessions.values()) == turns  # the last ones are cut short
