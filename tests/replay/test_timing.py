"""What steps and messages cost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.errors import ConfigError
from kvreplay.replay.network import NETWORK_PRESETS, LinkNetwork, LinkTiming
from kvreplay.replay.timing import TIMING_PRESETS, StepTiming
from kvreplay.sim.bus import Network
from kvreplay.sim.envelope import PULL_REQUEST, WRITE_DATA, Envelope

TIMINGS = st.builds(
    StepTiming,
    fixed_ns=st.integers(1, 50),
    per_prefill_token_ps=st.integers(0, 10_000),
    per_request_ns=st.integers(0, 9),
    per_kv_token_ps=st.integers(0, 5_000),
)


def test_a_step_costs_the_sum_of_its_parts_rounded_down_once() -> None:
    timing = StepTiming(fixed_ns=100, per_prefill_token_ps=700, per_request_ns=10, per_kv_token_ps=400)
    assert timing.step_ns(num_prefill_tokens=3, num_decodes=2, num_kv_tokens=1) == 100 + 20 + (2_100 + 400) // 1_000


@given(TIMINGS, st.integers(0, 9), st.integers(0, 5_000), st.integers(0, 60))
def test_a_run_of_decode_steps_costs_the_sum_of_its_steps(
    timing: StepTiming, decodes: int, kv: int, steps: int
) -> None:
    single = sum(timing.step_ns(0, decodes, kv + decodes * index) for index in range(steps))
    assert timing.decode_run_ns(decodes, kv, steps) == single


@given(TIMINGS, st.integers(0, 9), st.integers(0, 5_000), st.integers(0, 5_000))
def test_as_many_decode_steps_as_fit_and_no_more(timing: StepTiming, decodes: int, kv: int, span_ns: int) -> None:
    steps = timing.num_decode_steps_within(decodes, kv, span_ns)
    assert timing.decode_run_ns(decodes, kv, steps) <= span_ns < timing.decode_run_ns(decodes, kv, steps + 1)


def test_a_step_that_takes_no_time_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^timing\.fixed_ns must be > 0, got 0$"):
        StepTiming(fixed_ns=0, per_prefill_token_ps=1, per_request_ns=0, per_kv_token_ps=0)


def test_every_preset_is_known_by_its_own_name_and_says_its_source() -> None:
    for name, preset in TIMING_PRESETS.items():
        assert preset.timing.name == name
        assert len(preset.source) > 100
    for name, network in NETWORK_PRESETS.items():
        assert network.link.name == name
        assert len(network.source) > 100


def envelope(source: str, destination: str, size_bytes: int = 0) -> Envelope:
    kind = WRITE_DATA if size_bytes else PULL_REQUEST
    return Envelope(kind=kind, source=source, destination=destination, payload=None, size_bytes=size_bytes)


@pytest.fixture
def network() -> Network:
    """One microsecond of latency, one byte a nanosecond."""
    return LinkNetwork(LinkTiming(latency_ns=1_000, bandwidth_bytes_per_s=1_000_000_000))


def test_a_transfer_waits_behind_earlier_bytes_of_its_link(network: Network) -> None:
    assert network.transit_ns(envelope("P0/worker", "D0/worker", 500), now_ns=0) == 1_500
    assert network.transit_ns(envelope("P0/worker", "D0/worker", 500), now_ns=100) == 900 + 1_000
    assert network.transit_ns(envelope("P0/worker", "D0/worker", 500), now_ns=10_000) == 1_500


def test_links_do_not_hold_each_other_up(network: Network) -> None:
    network.transit_ns(envelope("P0/worker", "D0/worker", 500), now_ns=0)
    assert network.transit_ns(envelope("P0/worker", "D1/worker", 500), now_ns=0) == 1_500
    assert network.transit_ns(envelope("D0/worker", "P0/worker", 500), now_ns=0) == 1_500


def test_control_messages_overtake_bytes(network: Network) -> None:
    network.transit_ns(envelope("P0/worker", "D0/worker", 1_000_000), now_ns=0)
    assert network.transit_ns(envelope("P0/worker", "D0/worker"), now_ns=0) == 1_000


def test_parts_of_one_instance_talk_at_once(network: Network) -> None:
    assert network.transit_ns(envelope("D0/worker", "D0/scheduler", 500), now_ns=0) == 0


def test_a_started_nanosecond_counts() -> None:
    link = LinkTiming(latency_ns=0, bandwidth_bytes_per_s=3_000_000_000)
    assert [link.transfer_ns(size) for size in (1, 3, 4)] == [1, 1, 2]
