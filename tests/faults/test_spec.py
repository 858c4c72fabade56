"""`--inject NAME[:key=value,...]`: what it means, how it is written, and what is refused."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvreplay.errors import ConfigError
from kvreplay.events import KINDS
from kvreplay.faults.catalogue import catalogue
from kvreplay.faults.patterns import EventPattern
from kvreplay.faults.registry import settings_of
from kvreplay.faults.spec import COMMON_KEYS, Fault, keys_of, parse_spec
from kvreplay.faults.values import format_duration
from kvreplay.sim.catalogue import DURATION, EVENT, MOMENT, SHARE, FaultRow, Setting

# -- reading ---------------------------------------------------------------------------------------------


def test_a_name_alone_takes_every_default_and_hits_everything() -> None:
    fault = parse_spec("slow")
    assert (fault.name, fault.spec, fault.settings) == ("slow", "slow", {"delay": 10_000_000_000})
    assert fault.hits_everything


def test_keys_and_settings_are_typed() -> None:
    fault = parse_spec("slow:delay=500ms,p=0.02,nth=2..4,count=1,instance=D*,peer=P0,rank=1,group=0,id=b")
    assert fault.settings == {"delay": 500_000_000}
    assert (fault.p, fault.count, fault.rank, fault.group, fault.id) == (0.02, 1, 1, 0, "b")
    assert (fault.instance, fault.peer) == ("D*", "P0")
    assert not fault.hits_everything


def test_the_canonical_text_has_one_order_and_one_form() -> None:
    assert parse_spec("slow:delay=1000ms,nth=3,1,2, p=0.50").spec == "slow:p=0.5,nth=1..3,delay=1s"


def test_commas_and_backslashes_in_a_value_are_escaped() -> None:
    fault = parse_spec(r"abort:request=a\,b\\*")
    assert fault.request == r"a,b\*"
    assert fault.spec == r"abort:request=a\,b\\*"


def test_a_time_or_an_event_opens_and_closes_the_window() -> None:
    fault = parse_spec("timeout:after=90s,until=request.first_token@D0#r*")
    assert fault.after == 90_000_000_000
    assert isinstance(fault.until, EventPattern)
    assert (fault.until.instance, fault.until.request) == ("D0", "r*")


def test_a_late_message_that_waits_for_an_event_waits_for_nothing_else() -> None:
    assert parse_spec("slow:until=pull.settled#self").settings["delay"] == 0
    assert parse_spec("slow:until=pull.settled#self,delay=1s").settings["delay"] == 1_000_000_000
    assert parse_spec("slow:until=5m").settings["delay"] == 10_000_000_000


def test_never_is_a_duration_where_it_is_the_default() -> None:
    assert parse_spec("peer-crash:down=never").settings["down"] is None
    assert parse_spec("peer-crash:down=2m,at=pull.sent").settings["down"] == 120_000_000_000


# -- refusing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("tmeout", "no fault 'tmeout'; did you mean 'timeout'?"),
        ("", "no fault ''; kvreplay faults lists them"),
        ("zzzzzzz", "no fault 'zzzzzzz'; kvreplay faults lists them"),
        ("slow:dely=3s", "slow has no key 'dely'; did you mean 'delay'?"),
        ("slow:delay=3", "delay must be a duration such as 500ms, 2s or 1m, got '3'"),
        (
            "peer-crash:at=70",
            "at must be a time with its unit such as 500ms, 2s or 1m, or an event such as request.parked@D0, got '70'",
        ),
        ("peer-crash:at=zzz", "at names no event: no kind 'zzz'; an event is a row's kind, such as request.parked"),
        ("slow:delay=never", "delay must be a duration such as 500ms, 2s or 1m, got 'never'"),
        ("slow:", "expected key=value, got ''"),
        ("slow:delay", "expected key=value, got 'delay'"),
        ("slow:p=0.1,p=0.2", "p is given twice"),
        ("timeout:p=2", "p must be a probability above 0, up to 1, got '2'"),
        ("timeout:p=0", "p must be a probability above 0, up to 1, got '0'"),
        ("timeout:nth=0", "nth counts from 1: a number, a range such as 2..4 or a list of them, got '0'"),
        ("timeout:count=0", "count must be a whole number from 1, got '0'"),
        ("timeout:request=", "request must not be empty"),
        (
            "timeout:group=0",
            "timeout has no key 'group'; it has p, nth, count, after, until, request, instance, peer, rank, id",
        ),
        (
            "abort:peer=P0",
            "abort has no key 'peer'; it has p, nth, count, after, until, request, instance, id, when, delay",
        ),
        ("abort:when=pull", "when is one of queued, pulling, running, not 'pull'; did you mean 'pulling'?"),
        ("peer-crash:at=pul.sent", "at names no event: no kind 'pul.sent'; did you mean 'pull.sent'?"),
        ("timeout:after=pull.sent@", "after must be KIND[@INSTANCE][#REQUEST], got 'pull.sent@'"),
        (
            "scheduler.preempt:at=5s",
            "at names no event: no kind '5s'; an event is a row's kind, such as request.parked",
        ),
        ("partial-error:share=0", "share must be a share above 0, up to 1, got '0'"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_nearest(spec: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        parse_spec(spec)
    assert str(error.value) == f"--inject {spec}: {reason}"


def test_a_specs_length_is_bounded_and_so_is_what_is_printed_of_it() -> None:
    with pytest.raises(ConfigError, match=r"^--inject slow:id=x+\.\.\.: longer than 4096 characters$") as error:
        parse_spec("slow:id=" + "x" * 5000)
    assert len(str(error.value)) < 200


def refusal(spec: str) -> str:
    try:
        parse_spec(spec)
    except ConfigError as error:
        return str(error)
    return ""


@given(st.text(max_size=60))
def test_no_text_does_more_than_be_refused_in_one_line(text: str) -> None:
    for spec in (text, f"slow:{text}", f"peer-crash:at={text}"):
        assert len(refusal(spec).splitlines()) <= 1


# -- the round trip --------------------------------------------------------------------------------------

names = st.text(st.characters(codec="ascii", categories=["L", "N", "P", "S"]), min_size=1, max_size=12)
durations = st.integers(0, 10**15).map(format_duration)
events = st.sampled_from(sorted(KINDS)).flatmap(lambda kind: st.sampled_from([kind, f"{kind}@D0", f"{kind}#r*"]))
moments = durations | events
probabilities = st.floats(0.001, 1).map(repr)
common = {
    "p": probabilities,
    "nth": st.lists(st.integers(1, 99), min_size=1, max_size=4).map(lambda some: ",".join(map(str, some))),
    "count": st.integers(1, 99).map(str),
    "after": moments,
    "until": moments,
    **dict.fromkeys(("request", "instance", "peer", "id"), names),
    **dict.fromkeys(("rank", "group"), st.integers(0, 9).map(str)),
}


def values_of(setting: Setting) -> st.SearchStrategy[str]:
    if setting.choices:
        return st.sampled_from(setting.choices)
    by_unit = {DURATION: durations, MOMENT: moments, EVENT: events, SHARE: probabilities}
    if setting.unit in by_unit:
        return by_unit[setting.unit]
    return st.integers(1, 99).map(str) if isinstance(setting.default, int) else names


def escaped(text: str) -> str:
    return re.sub(r"([,\\])", r"\\\1", text)


@st.composite
def specs(draw: st.DrawFn) -> str:
    row: FaultRow = draw(st.sampled_from(list(catalogue().values())))
    options = {key: common[key] for key in keys_of(row)}
    options |= {name: values_of(setting) for name, setting in settings_of(row).items()}
    chosen = draw(st.lists(st.sampled_from(sorted(options)), unique=True)) if options else []
    pairs = [(key, draw(options[key])) for key in chosen]
    written = [f"{key}={value if key == 'nth' else escaped(value)}" for key, value in pairs]
    return f"{row.name}:{','.join(written)}" if written else row.name


def meaning(fault: Fault) -> dict[str, object]:
    keys = {key: getattr(fault, key) for key in COMMON_KEYS}
    return {"name": fault.name, "settings": fault.settings, "spec": fault.spec, **keys}


@given(specs())
def test_the_canonical_text_means_the_same_fault(text: str) -> None:
    fault = parse_spec(text)
    assert meaning(parse_spec(fault.spec)) == meaning(fault)
