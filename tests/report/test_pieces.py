"""Numbers, sparklines, the command to reproduce, JSON and progress."""

import io
import json
import shlex

import msgspec
import pytest
from rich.console import Console

from kvreplay.report.json_report import write_json
from kvreplay.report.progress import progress
from kvreplay.report.reproduce import command_lines
from kvreplay.report.sparkline import columns, sparkline
from kvreplay.report.words import causes, duration, listed, safe, share, size
from kvreplay.verdict.model import InEffect, Summary


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "-"),
        (0.0, "0 s"),
        (0.000004912, "4.91 us"),
        (0.0009999, "1.00 ms"),
        (0.00825, "8.25 ms"),
        (0.021, "21.0 ms"),
        (0.25, "250 ms"),
        (0.9999, "1.00 s"),
        (2.107, "2.11 s"),
        (12.04, "12.0 s"),
        (99.96, "100.0 s"),
        (118.42, "118.4 s"),
        (3601.2, "3,601 s"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (999_600, "1.00 MB"),
        (3_276_800, "3.28 MB"),
        (47_185_920, "47.2 MB"),
        (1_310_720_000, "1.31 GB"),
        (1_234_000_000_000, "1,234 GB"),
    ],
)
def test_sizes(num_bytes: int, text: str) -> None:
    assert size(num_bytes) == text


def test_shares() -> None:
    assert [share(0, 10), share(1, 3), share(1, 10_000), share(1, 0)] == ["0.0 %", "33.3 %", "< 0.1 %", "-"]


def test_counts_are_listed_by_size() -> None:
    assert listed({"failed": 2, "aborted": 2, "stalled": 1200}) == "1,200 stalled, 2 aborted, 2 failed"


def test_long_lists_of_causes_are_cut_and_nothing_is_lost() -> None:
    counts = {f"cause {place}": 9 - place for place in range(6)}
    assert causes(counts, most=2) == "cause 0 (9), cause 1 (8), 4 other causes (22)"
    assert causes({"timeout": 12}) == "timeout"
    assert causes({"": 3}) == ""
    assert causes({"": 3, "timeout": 12}) == "timeout (12), without a cause (3)"


def test_safe_keeps_what_is_printable() -> None:
    assert safe("größe 木 [x] 50 %") == "größe 木 [x] 50 %"
    assert safe("a\tb\x1b[0m\x9b\ud800") == "a\\tb\\x1b[0m\\x9b\\ud800"


def test_columns_take_the_highest_of_a_slice_and_hold_the_last() -> None:
    assert columns([0.0, 1.0, 1.5, 7.0, 8.0], [3, 9, 4, 1, 2], end=8.0, width=4) == [9, 9, 9, 2]
    assert columns([6.0, 7.0, 8.0], [5, 1, 4], end=8.0, width=2) == [0, 5]


def test_a_line_is_no_longer_than_what_is_known() -> None:
    assert columns([10.0, 12.5], [7, 3], end=12.5, width=40) == [7, 3]
    assert columns([0.0], [5], end=0.0, width=2) == [5]


def test_only_zero_is_blank() -> None:
    assert sparkline([0, 1, 50, 99, 100, 130], 100) == " ▁▄██" + "█"
    assert sparkline([0, 1, 50, 100], 100, ascii_only=True) == " .=@"
    assert sparkline([0, 0], 0) == "  "


def in_effect(**changes: object) -> InEffect:
    plain = InEffect(
        trace="decode-stall",
        config="mooncake-1p1d",
        config_origin="the trace",
        profile="vllm-0.33",
        profile_origin="the default",
        policy="fail",
        policy_origin="the config",
    )
    return msgspec.structs.replace(plain, **changes)


def command(given: InEffect) -> str:
    (line,) = command_lines(given, 1000)
    return line


def test_a_plain_run_has_a_short_command() -> None:
    assert command(in_effect()) == "kvreplay run decode-stall --seed 0"


def test_all_that_was_given_is_given_again() -> None:
    given = in_effect(
        config_origin="--config",
        policy_origin="--policy",
        injected=["timeout:request=a b*"],
        plan="night.toml",
        behaviours=["transfer_fence=attempt"],
        fail_on=("crashed", "failed"),
        overdue_after_s=2.5,
        limit=10,
    )
    assert command(given) == (
        "kvreplay run decode-stall --config mooncake-1p1d --policy fail --behaviour transfer_fence=attempt"
        " --plan night.toml --inject 'timeout:request=a b*' --limit 10 --fail-on crashed,failed"
        " --overdue-after 2.5 --seed 0"
    )


def test_numbers_are_given_as_exactly_as_they_were() -> None:
    given = in_effect(overdue_after_s=1234567.5, time_scale=0.12345678, transport="zmq")
    assert "--overdue-after 1234567.5 --transport zmq --time-scale 0.12345678" in command(given)
    assert "--overdue-after 20 --transport" in command(in_effect(overdue_after_s=20.0, time_scale=5.0, transport="zmq"))


def test_what_set_changed_does_not_hide_where_the_rest_came_from() -> None:
    given = in_effect(
        config_origin="--config --set cache.num_gpu_blocks=512",
        settings=["cache.num_gpu_blocks=512"],
        profile_origin="--profile --behaviour pull_wait=bounded",
        behaviours=["pull_wait=bounded"],
    )
    assert command(given) == (
        "kvreplay run decode-stall --config mooncake-1p1d --profile vllm-0.33 --set cache.num_gpu_blocks=512"
        " --behaviour pull_wait=bounded --seed 0"
    )


def test_a_long_command_is_parted_between_options_as_a_shell_takes_it() -> None:
    given = in_effect(injected=["timeout:request=a b*", "slow:delay=3s,p=0.25,instance=D0,peer=P0"], limit=10)
    lines = command_lines(given, 59)
    assert lines == [
        "kvreplay run decode-stall --inject 'timeout:request=a b*' \\",
        "  --inject slow:delay=3s,p=0.25,instance=D0,peer=P0 \\",
        "  --limit 10 --seed 0",
    ]
    assert shlex.split("\n".join(lines).replace("\\\n", "")) == shlex.split(command(given))


def test_nothing_counting_is_given_again_too() -> None:
    assert "--fail-on none" in command(in_effect(fail_on=()))


def test_json_is_one_object_and_nothing_else(summary: Summary) -> None:
    out = io.StringIO()
    write_json(summary.with_wall_seconds(2.5), out)
    document = json.loads(out.getvalue())
    assert (document["verdict"], document["wall_seconds"], len(document["stalled"])) == ("stalled", 2.5, 240)
    assert out.getvalue().endswith("}\n")


def test_progress_is_silent_when_piped() -> None:
    out = io.StringIO()
    with progress(100, Console(file=out)) as advance:
        advance(50, 10**9)
    assert out.getvalue() == ""


def test_progress_shows_how_far_it_is_and_goes_when_done() -> None:
    out = io.StringIO()
    with progress(100, Console(file=out, force_terminal=True, width=120)) as advance:
        for done in range(101):
            advance(done, done * 10**9)
    assert "100/100 requests" in out.getvalue()
    assert "at 100 s" in out.getvalue()
    assert out.getvalue().endswith("\x1b[2K")


def test_progress_leaves_nothing_behind_when_interrupted() -> None:
    out = io.StringIO()

    def interrupted() -> None:
        with progress(100, Console(file=out, force_terminal=True, width=120)):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert "\x1b[?25h" in out.getvalue()
