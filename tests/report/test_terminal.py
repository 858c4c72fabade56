"""The report for people: what it says, at any width, piped or not."""

import io
import re
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvreplay.report.terminal import print_report
from kvreplay.verdict.model import FaultCount, Reason, Summary

Printed = Callable[..., list[str]]


def printed(summary: Summary, width: int = 80, **options: Any) -> list[str]:  # noqa: ANN401
    out = io.StringIO()
    print_report(summary, Console(file=out, width=width, **options))
    return out.getvalue().splitlines()


def section(lines: list[str], title: str) -> list[str]:
    """The lines of the section that starts with `title`, without it."""
    start = next(place for place, line in enumerate(lines) if line.startswith(title))
    rest = lines[start + 1 :]
    titles = [place for place, line in enumerate(rest) if line and not line.startswith(" ")]
    return [line for line in rest[: titles[0] if titles else len(rest)] if line]


def words(lines: Iterable[str]) -> set[str]:
    return set(re.split(r"[\s,]+", "\n".join(lines)))


def changed(summary: Summary, **changes: Any) -> Summary:  # noqa: ANN401
    return msgspec.structs.replace(summary, **changes)


def test_the_verdict_comes_first_with_its_reason_and_what_to_beware_of(summary: Summary) -> None:
    assert printed(summary.with_wall_seconds(12.3))[:5] == [
        "STALLED  exit status 4",
        "240 requests will never end, all waiting on the reply of a pull",
        "! slow:nth=9000 never fired: it tested nothing",
        "! prefill-0 is overloaded: computed 97 % of the time",
        "3,601 s of virtual time in 12.3 s, 293 times as fast",
    ]


def test_what_no_fault_explains_is_said_under_the_verdict(summary: Summary) -> None:
    requests = msgspec.structs.replace(summary.requests, rejected=60, rejected_unfaulted=60, failed_unfaulted=2)
    reasons = [*summary.reasons, Reason(outcome="rejected", cause="max_model_len of 10 exceeded", count=60)]
    rejected = changed(summary, requests=requests, reasons=reasons, instances=[])
    assert printed(rejected, 200)[2:4] == [
        "! slow:nth=9000 never fired: it tested nothing",
        "! 60 requests rejected without a fault to blame: max_model_len of 10 exceeded",
    ]  # of failures beside faults the violations say more
    assert printed(changed(rejected, faults=[]), 200)[2:4] == [
        "! 60 requests rejected without a fault to blame: max_model_len of 10 exceeded",
        "! 2 requests failed without a fault to blame",
    ]


def test_an_action_that_came_too_late_is_worth_a_word_and_says_where_it_acted(summary: Summary) -> None:
    late = FaultCount(spec="peer-crash", name="peer-crash", fired=1, requests=0, fired_late=1, acted_on=["P0"])
    lines = printed(changed(summary, faults=[late]))
    assert lines[2] == "! peer-crash fired only after every request had ended: it tested nothing"
    assert section(lines, "Faults")[1].split() == ["peer-crash", "1", "0", "on", "P0:", "-"]


def test_requests_are_listed_by_outcome_with_reasons(summary: Summary) -> None:
    lines = printed(summary)
    assert "Requests  12,031" in lines
    assert section(lines, "Requests") == [
        "  finished  11,779   97.9 %",
        "  failed        12    0.1 %  kv load failure",
        "  stalled      240    2.0 %  200 lost for good, 40 ended once the faults were",
        "                             gone",
        "  overdue        2  < 0.1 %  ended late",
    ]


def test_stalls_are_grouped_then_listed_and_cut(summary: Summary) -> None:
    lines = section(printed(summary), "Stalled")
    assert lines[:3] == [
        "  waiting on           peer       on           stalled   blocks",
        "  the reply of a pull  prefill-0  2 instances      240  180,000",
        "  request            instance  status                      since  blocks",
    ]
    assert lines[3] == "  conversation-0000  decode-0  WAITING_FOR_REMOTE_KVS  100.250 s     750"
    assert len(lines) == 3 + 10 + 1
    assert lines[-1] == "  ... and 230 more stalled requests; --json lists all"


def test_a_wide_report_says_more_of_each_stall(summary: Summary) -> None:
    line = section(printed(summary, 120), "Stalled")[3]
    assert line.endswith("WAITING_FOR_REMOTE_KVS  100.250 s     750  750,000  prefill-0  timeout:p=0.02")


def test_what_healing_ended_says_so(summary: Summary) -> None:
    healed = msgspec.structs.replace(summary.stalled[0], ended="finished")
    lines = section(printed(changed(summary, stalled=[healed, summary.stalled[1]]), 100), "Stalled")
    assert [line.split()[-1] for line in lines[-2:]] == ["finished", "lost"]


def test_violations_are_grouped_by_checker_and_fault(summary: Summary) -> None:
    lines = section(printed(summary, 120), "Violations  13")
    text = " ".join(" ".join(lines).split())
    assert "CONTENT 12 corrupt:p=0.01 12.500 s, decode-0, conversation-0000, block 41, group 0, x-0: token 656" in text
    assert "CONTENT 1 - 111.500 s, decode-0, conversation-0099" in text
    assert lines[-1] == "  not counted, because they follow from what is reported: 1 PROGRESS"


def test_a_run_without_violations_says_so(summary: Summary) -> None:
    assert "Violations  none" in printed(changed(summary, violations=[]))


def test_many_kinds_of_violation_are_cut(summary: Summary) -> None:
    kinds = [msgspec.structs.replace(summary.violations[0], checker=f"LAW-{index}") for index in range(14)]
    assert "  ... and 4 more kinds of violation; --json lists all" in printed(changed(summary, violations=kinds))


def test_faults_say_how_often_they_fired_and_what_became_of_their_requests(summary: Summary) -> None:
    lines = printed(summary)
    assert "Faults  1 of 2 never fired" in lines
    assert section(lines, "Faults")[1:] == [
        "  timeout:p=0.02    252    252  240 stalled, 12 failed",
        "  slow:nth=9000   never      0  -",
    ]


def test_recomputed_tokens_and_evictions_by_cause(summary: Summary) -> None:
    lines = printed(summary)
    assert "Recomputed tokens  12,345, < 0.1 % of all computed" in lines
    assert section(lines, "Recomputed tokens") == [
        "  load-failure         12,000  97.2 %",
        "  eviction                345   2.8 %",
        "  (all computed)  344,000,000",
        "  (all loaded)      1,720,000",
        "  12 of 12,031 loads failed: timeout",
    ]
    assert section(lines, "Evicted blocks  2,345") == [
        "  capacity      group 0  2,300",
        "  load-failure  group 0     45",
    ]


def test_latencies_have_units(summary: Summary) -> None:
    lines = section(printed(summary), "Latency")
    assert lines[0].split() == ["p50", "p90", "p99", "requests"]
    assert lines[1] == "  time to first token    2.11 s  29.1 ms  118.4 s    11,779"


def test_instances_say_how_busy_they_were(summary: Summary) -> None:
    assert section(printed(summary), "Instances")[1:] == [
        "  prefill-0  prefill  59.9 %  86,000  60,123 of 131,072          3",
        "  decode-0   decode   59.9 %  86,000  60,123 of 131,072          3",
    ]


@pytest.mark.parametrize("width", [80, 100, 120, 200])
def test_the_plot_fills_the_width_and_not_more(summary: Summary, width: int) -> None:
    lines = section(printed(summary, width), "Over time")
    assert [line.split("|")[0].split()[-1] for line in lines] == ["blocks", "running", "deferred"] * 2
    assert max(map(len, lines)) == min(width, 120)
    assert lines[0].endswith("|  most 261,352 of 262,144")
    drawn = lines[0].split("|")[1]
    assert (drawn[0], drawn[-1]) == ("▁", "█")
    assert lines[2].split("|")[1].strip() == "█" * (len(drawn) - len(drawn) // 2)


def test_the_plot_needs_no_unicode(summary: Summary) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    print_report(summary, Console(file=out, width=80))
    out.seek(0)
    assert any(line.startswith("  prefill  blocks    |.") for line in out.read().splitlines())


def test_what_was_in_effect_and_how_to_run_it_again(summary: Summary) -> None:
    lines = printed(summary)
    assert section(lines, "In effect") == [
        "  trace                   conv.parquet              the first 1,000 requests",
        "  config                  mooncake-4p4d             --config",
        "  profile                 pre-50984                 --profile",
        "  kv_load_failure_policy  fail                      vLLM's default",
        "  seed                    7",
        "  set                     cache.num_gpu_blocks=512  --set",
    ]
    assert section(lines, "Reproduce") == [
        "  kvreplay run conv.parquet --config mooncake-4p4d --profile pre-50984 \\",
        "    --set cache.num_gpu_blocks=512 --inject timeout:p=0.02 \\",
        "    --inject slow:nth=9000 --limit 1000 --seed 7",
        "  fingerprint 0123456789abcdef",
    ]


def test_a_crash_comes_right_after_the_verdict(summary: Summary) -> None:
    assert section(printed(summary), "Crashes  1 engine")[1:] == [
        "  prefill-1  3,000.500 s     -  AssertionError: block 3 is free  -"
    ]


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_everything_keeps_within_the_width_and_loses_no_word(summary: Summary, width: int) -> None:
    lines, same_wide = printed(summary, width), printed(summary, 119 if width < 120 else 1000)
    assert max(map(len, lines)) <= width
    assert all(line == line.rstrip() for line in lines)
    assert words(line for line in same_wide if "|" not in line) <= words(lines)


def test_a_fault_is_broken_between_its_settings_only(summary: Summary) -> None:
    spec = "mooncake.pull-req-lost:p=0.025,nth=1,3,count=1000,instance=decode-1,peer=prefill-0,after=90s"
    fault = msgspec.structs.replace(summary.faults[0], spec=spec)
    lines = section(printed(changed(summary, faults=[fault]), 60), "Faults")
    settings = ["mooncake.pull-req-lost:p=0.025,", "nth=1,3,", "count=1000,", "instance=decode-1,", "peer=prefill-0,"]
    shown = next(line.split()[0] for line in lines if "mooncake" in line)
    assert shown in ("".join(settings[:count]) for count in range(1, 6))
    assert spec in "".join(word for line in lines[1:] for word in line.split()[:1])


def test_a_long_name_stays_whole_and_the_rest_gives_way(summary: Summary) -> None:
    name = "chatcmpl-" + "0123456789abcdef" * 4
    stall = msgspec.structs.replace(summary.stalled[0], request_id=name)
    lines = section(printed(changed(summary, stalled=[stall])), "Stalled")
    place = lines.index(f"  {name}")
    assert lines[place + 1].split() == ["decode-0", "WAITING_FOR_REMOTE_KVS", "100.250", "s", "750"]
    assert max(map(len, lines)) <= 80


def test_those_that_a_fault_did_not_name_are_told_apart(summary: Summary) -> None:
    fault = msgspec.structs.replace(summary.faults[0], requests=1, outcomes={"failed": 1}, followed={"failed": 8})
    line = section(printed(changed(summary, faults=[fault])), "Faults")[1]
    assert line == "  timeout:p=0.02    252      1  1 failed; not named: 8 failed later"


def test_more_requests_than_there_are_is_all_of_them(summary: Summary) -> None:
    assert summary.in_effect is not None
    more = msgspec.structs.replace(summary.in_effect, limit=20_000)
    assert section(printed(changed(summary, in_effect=more)), "In effect")[0].split() == [
        *("trace", "conv.parquet", "all", "requests")
    ]


def test_busy_is_over_the_time_with_work_where_that_is_known(summary: Summary) -> None:
    instance = msgspec.structs.replace(summary.instances[0], busy=0.8123, busy_until_s=2653.0)
    assert "81.2 %" in section(printed(changed(summary, instances=[instance])), "Instances")[1]


def test_no_colour_where_none_is_wanted(summary: Summary, monkeypatch: pytest.MonkeyPatch) -> None:
    def coloured() -> bool:
        lines = printed(summary, force_terminal=True, color_system="standard")
        return any(code in line for line in lines for code in ("\x1b[1;35m", "\x1b[33m"))

    monkeypatch.delenv("NO_COLOR", raising=False)
    assert coloured()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not coloured()
    assert not any("\x1b" in line for line in printed(summary))


def test_foreign_text_neither_styles_nor_commands_the_terminal(summary: Summary) -> None:
    stall = msgspec.structs.replace(summary.stalled[0], request_id="[red]r1[/]\x1b[2J", waiting_on="a\nb")
    crash = msgspec.structs.replace(summary.crashes[0], message="[bold]\u202eoops")
    hostile = changed(summary, stalled=[stall], crashes=[crash], reason="[link=http://x]\x07")
    lines = printed(hostile, 140)
    text = "\n".join(lines)
    assert "[red]r1[/]\\x1b[2J" in text
    assert "a\\nb" in text
    assert "[bold]\\u202eoops" in text
    assert lines[1] == "[link=http://x]\\x07"


def test_the_cost_of_the_faults_stands_beside_the_faultless_twin(summary: Summary) -> None:
    requests = msgspec.structs.replace(summary.requests, finished=12_031, failed=0, stalled=0)
    lines = section(printed(summary.with_baseline(changed(summary, requests=requests))), "Cost of the faults")
    assert lines[0].split() == ["this", "run", "without", "faults", "difference"]
    assert lines[1:4] == [
        "  finished                11,779          12,031        -252",
        "  failed                      12               0         +12",
        "  stalled                    240               0        +240",
    ]
    assert lines[4].split()[-1] == "-"


def test_the_outcomes_beside_the_twin_add_up_to_all_requests(summary: Summary) -> None:
    twin = msgspec.structs.replace(summary.requests, finished=12_031, failed=0, stalled=0)
    requests = msgspec.structs.replace(summary.requests, finished=11_000, rejected=700, aborted=70, unfinished=9)
    report = changed(summary, requests=requests).with_baseline(changed(summary, requests=twin))
    lines = [line.split() for line in section(printed(report), "Cost of the faults")[1:7]]
    assert [line[0] for line in lines] == ["finished", "failed", "aborted", "rejected", "stalled", "unfinished"]
    for column, total in ((1, 12_031), (2, 12_031)):
        assert sum(int(line[column].replace(",", "")) for line in lines) == total


def test_a_small_run_has_a_small_report(summary: Summary) -> None:
    small = changed(
        summary, stalled=[], violations=[], faults=[], crashes=[], series=[], instances=[], in_effect=None, reasons=[]
    )
    titles = [line.split("  ")[0] for line in printed(small) if line and not line.startswith((" ", "!"))]
    assert titles[3:] == ["Requests", "Violations", "Recomputed tokens", "Evicted blocks", "Latency", "Reproduce"]
