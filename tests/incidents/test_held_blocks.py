"""Public incidents of class C: blocks, slots and locks that requests of the past hold.

Each class is an incident; the version that had it wrong is a switch or a fault away. SGLang's and vllm-ascend's are
shown with the connectors there are: the docstrings say what stands for what.
"""

from dataclasses import replace

import pytest

from kvreplay.connectors.mooncake.worker import MooncakeWorker
from kvreplay.connectors.simple_cpu.config import SimpleCpuConfig
from kvreplay.ids import NS_PER_MS
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, KVCacheGroupSpec
from kvreplay.replay.config import ConnectorConfig
from kvreplay.trace.workload import ClientAbort
from tests.incidents import scripted
from tests.incidents.clusters import FULL, crashes, how, laws, producer_and_consumer, sized
from tests.incidents.scripted import Outcome, engine, load
from tests.scenarios.offload_stage import SLOT, offloading, there_and_back
from tests.scenarios.stage import Play, pair, play, request, role, single, workload
from tests.scenarios.test_multi import both

STATES = KVCacheGroupSpec(kind=MAMBA, block_size=16, mamba_cache_mode=MAMBA_ALIGN, state_bytes=16)


@pytest.mark.incident("C10")
class TestC10PullsOfStrangersOccupyTheSenderTasks:
    """vllm#51236: a producer of 4 sender tasks is asked for 4 transfers that nobody announces; `r` comes a second
    later. The incident's times are ten times as long here, with the real defaults: 480 s, and 60 s for an orphan."""

    def play(self, behaviour: str) -> Play:
        clients = workload(request("first"), request("r", 1000))
        fault = "mooncake.queue-saturation:request=first,pulls=4"
        return play(pair(num_workers=2), clients, fault, behaviour=behaviour)

    @pytest.mark.parametrize(
        ("behaviour", "since_ms", "num_left"),
        [
            ("vllm-0.33", 480_004, 4),
            ("vllm-0.33 mooncake_placeholder=orphan-timeout", 60_004, 0),
            ("vllm-0.33 mooncake_sender_tasks=release", 1011, 4),
            ("ideal", 1011, 0),
        ],
    )
    def test_how_long_others_wait_for_them(self, behaviour: str, since_ms: int, num_left: int) -> None:
        """`num_left`: placeholders that stay for ever."""
        played = self.play(behaviour)
        assert how(played) == {"first": "finished", "r": "finished"}
        (sent,) = played.of("send.started", request_id="r")
        assert sent.time_ns == since_ms * NS_PER_MS
        worker = played.cluster.nodes[0].worker
        assert isinstance(worker, MooncakeWorker)
        assert worker.producer is not None
        assert len(worker.producer.entries) == num_left
        assert laws(played) == set()

    def test_a_request_that_is_announced_in_time_is_no_orphan(self) -> None:
        """P is busy for 40 s before it takes `late` up, and for 40 more until it has computed it."""
        slow = replace(role(max_num_batched_tokens=4, max_num_seqs=1), timing=role().timing)
        slow = replace(slow, timing=replace(slow.timing, fixed_ns=4_000 * NS_PER_MS))
        clients = workload(request("busy", prompt_tokens=40), request("late", 2, prompt_tokens=40))
        behaviour = "vllm-0.33 mooncake_placeholder=orphan-timeout"
        played = play(pair(prefill=slow), clients, behaviour=behaviour)
        assert how(played) == {"busy": "finished", "late": "finished"}
        assert [event.status for event in played.of("pull.settled")] == ["ok", "ok"]


@pytest.mark.incident("C11")
class TestC11TheCompletionOfAnAbortedLoadIsFilteredOut:
    """vllm-ascend#16662: 64 tokens are loaded in steps 0 to 3, and aborted in step 1; three times, of 12 blocks."""

    def outcome(self, *, is_reported: bool, behaviour: str = "vllm-0.33") -> Outcome:
        requests = [scripted.request(f"R{n}", 64, 8 * n, max_tokens=1, **load(64, after=3)) for n in range(4)]
        for aborted in requests[:3]:
            if not is_reported:
                del aborted["load"]["recv_after"]
        events = [{"step": 8 * n + 1, "abort": [f"R{n}"]} for n in range(3)]
        return Outcome(engine(12), requests, behaviour=behaviour, events=events)

    def test_each_abort_costs_four_blocks_and_the_fourth_request_stalls(self) -> None:
        outcome = self.outcome(is_reported=False)
        assert [outcome.free[step] for step in (6, 14, 22)] == [8, 4, 0]
        assert outcome.laws == {"PROGRESS"}
        assert outcome.finished == []

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_where_it_is_delivered_all_come_back(self, behaviour: str) -> None:
        outcome = self.outcome(is_reported=True, behaviour=behaviour)
        assert [outcome.free[step] for step in (2, 6, 10, 14, 22)] == [8, 12, 8, 12, 12]
        assert outcome.laws == set()
        assert outcome.finished == ["R3"]

    @pytest.mark.parametrize(("behaviour", "broken"), [("vllm-0.33", {"CONSERVATION"}), ("ideal", set())])
    def test_from_a_cpu_tier(self, behaviour: str, broken: set[str]) -> None:
        """A load of 160 ms; the worker's report of it is lost. Ideally it is sent again."""
        clients = replace(there_and_back(), aborts=(ClientAbort("b", 420 * NS_PER_MS),))
        fault = "offload.ack-lost:request=b,nth=1"
        played = play(offloading(load_bytes_per_s=100), clients, fault, behaviour=behaviour)
        assert how(played) == {"a": "finished", "f": "finished", "b": "aborted"}
        assert laws(played) == broken
        assert played.num_free("E0") == (12 if broken else 16)


@pytest.mark.incident("C12")
class TestC12AnAbortedLoadWhoseProducerNeverAnswers:
    """vllm#46283, vllm#46289: push mode. Mooncake's producers write, too; the lease of 30 s is the producer's abort
    timeout, the deadline of 40 s the consumer's receive timeout. R is aborted at 2 ms, the answer comes after 45 s."""

    def play(self, behaviour: str, *faults: str) -> Play:
        config = producer_and_consumer(abort_request_timeout=30, receive_timeout=40)
        clients = workload(
            request("r", prompt_tokens=64),
            request("s", 20_000, prompt_tokens=64),
            request("t", 41_000, prompt_tokens=64, output_tokens=9),
            aborts=[("r", 2)],
        )
        return play(config, clients, *faults, behaviour=behaviour)

    LATE = "mooncake.resp-delayed:request=r,delay=45s"

    def test_without_a_deadline_its_blocks_are_lost(self) -> None:
        played = self.play("pre-50984", self.LATE)
        assert played.num_free("D0") == 8
        assert laws(played) == {"CONSERVATION"}

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("fault", [LATE, "mooncake.conn-refused:request=r"])
    def test_with_one_they_come_back_then_and_what_comes_later_is_nothing(self, behaviour: str, fault: str) -> None:
        played = self.play(behaviour, fault)
        assert how(played) == {"r": "aborted", "s": "finished", "t": "finished"}
        (freed,) = played.of("block.freed", instance="D0", request_id="r")
        assert (freed.time_ns // (1000 * NS_PER_MS), list(freed.block_ids or ())) == (40, [4, 3, 2, 1])
        taken = [event.block_ids for event in played.of("block.allocated", instance="D0", request_id="s")]
        assert not {1, 2, 3, 4} & {block_id for block_ids in taken for block_id in block_ids or ()}
        assert (laws(played), crashes(played), played.broken_laws()) == (set(), [], [])
        assert played.num_free("D0") == 12

    def test_a_producer_that_has_died_is_no_other_case(self) -> None:
        played = self.play("vllm-0.33", "peer-crash:at=5ms,down=30s")
        (freed,) = played.of("block.freed", instance="D0", request_id="r")
        assert freed.time_ns // (1000 * NS_PER_MS) == 40
        (at_once,) = self.play("ideal", "peer-crash:at=5ms,down=30s").of("block.freed", instance="D0", request_id="r")
        assert at_once.time_ns < 10 * NS_PER_MS


@pytest.mark.incident("C13")
class TestC13StatesStayReferencedAfterTheirStore:
    """vllm-ascend#15674: the worker says nothing of the stores of a group. SimpleCPUOffload holds what it stores until
    then, in each group; here its copy thread has died, and nothing is heard of any store. 512 tokens in chunks of 64,
    of 40 blocks; every chunk's state is kept and stored."""

    def play(self, behaviour: str, *faults: str) -> Play:
        options = SimpleCpuConfig(cpu_bytes_to_use=200 * 16, copy_latency=1e-6)
        base = replace(
            single(role(max_num_batched_tokens=64)), connector=ConnectorConfig(kind="simple_cpu", options=options)
        )
        config = sized(base, {"engine": 40}, max_model_len=520, groups=(FULL, STATES))
        own = config.roles["engine"]
        own = replace(own, cache=replace(own.cache, prefix_cache_retention_interval=None))
        clients = workload(
            *(request(f"r{place}", 1000 * place, prompt_tokens=512, output_tokens=2) for place in range(3))
        )
        return play(replace(config, roles={"engine": own}), clients, *faults, behaviour=behaviour)

    FAULT = "simple-cpu.copy-raises:nth=1"

    def test_free_blocks_fall_until_nothing_fits(self) -> None:
        """The first request itself cannot end: 32 blocks of attention, and a state of each of its chunks."""
        played = self.play("vllm-0.33", self.FAULT)
        stalled = {event.request_id: event.cause for event in played.of("request.stalled")}
        assert stalled == dict.fromkeys(["r0", "r1", "r2"], "free blocks")
        assert played.num_free("E0") < 32
        assert laws(played) == {"CONSERVATION"}

    @pytest.mark.parametrize(("behaviour", "faults"), [("vllm-0.33", ()), ("ideal", ()), ("ideal", (FAULT,))])
    def test_reported_they_come_back(self, behaviour: str, faults: tuple[str, ...]) -> None:
        played = self.play(behaviour, *faults)
        assert set(how(played).values()) == {"finished"}
        assert (laws(played), played.num_free("E0")) == (set(), 40)
        held: set[int] = set()
        most = 0
        for event in played.of("block.allocated", "block.freed", request_id="r0"):
            if event.group == 1:
                ids = set(event.block_ids or ()) - {0}
                held = held | ids if event.kind == "block.allocated" else held - ids
                most = max(most, len(held))
        assert most == 2


@pytest.mark.incident("C16")
class TestC16NothingToSendIsAnEndToo:
    """sglang#28652: of a probe that is sent again everything is cached, and its sender has no page to send. The same
    over Mooncake: with states D needs 64 of 65 tokens, has them all, and asks for no block; P holds its own until then.
    """

    def play(self, behaviour: str, *faults: str) -> Play:
        text = [f"t{place}" for place in range(17)]
        probes = (request(f"probe{n}", 1000 * n, prompt_tokens=65, output_tokens=2, text=text) for n in range(2))
        config = producer_and_consumer(16, 16, groups=(FULL, STATES), abort_request_timeout=48)
        return play(config, workload(*probes), *faults, behaviour=behaviour)

    @staticmethod
    def freed_ms(played: Play) -> float:
        """When P has given back the last of the second probe's blocks."""
        return max(event.time_ns / NS_PER_MS for event in played.of("block.freed", instance="P0", request_id="probe1"))

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_it_concludes_at_once(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert [event.num_blocks for event in played.of("pull.sent", request_id="probe1")] == [0]
        assert not played.of("send.started", request_id="probe1")
        assert self.freed_ms(played) == 1011  # P ends its prefill then
        assert (laws(played), played.num_free("P0")) == (set(), 16)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_where_it_does_not_a_timeout_is_the_net(self, behaviour: str) -> None:
        played = self.play(behaviour, "mooncake.release-only-fail:request=probe1")
        assert self.freed_ms(played) == 1011 + 48_000 + 1  # the next poll
        assert how(played)["probe1"] == "finished"
        assert (laws(played), played.num_free("P0")) == (set(), 16)

    @pytest.mark.parametrize(("sends", "free"), [(True, [12, 12]), (False, [8, 7])])
    def test_where_nothing_is_ever_said_the_lock_stays(self, *, sends: bool, free: list[int]) -> None:
        """64 tokens twice in blocks of 16: the second time 48 are hit, and a block is held more, for ever."""
        say = {"send_after": 2} if sends else {}
        probes = [
            scripted.request(f"R{n}", 64, 8 * n, first=5, max_tokens=1, delay_free="always", **say) for n in range(2)
        ]
        outcome = Outcome(engine(12), probes)
        assert outcome.computed("R1") == [48]
        assert [outcome.free[6], outcome.free[-1]] == free


@pytest.mark.incident("C17")
class TestC17WhatTheDecodeSideHasAbortedWaitsOnInThePrefillQueue:
    """sglang#28236: the producer's slots are Mooncake's sender tasks, four of them. P is busy for ten steps; four
    requests have asked for their blocks, and are aborted on D; then r5 comes."""

    GONE = ("r1", "r2", "r3", "r4")

    def play(self, behaviour: str) -> Play:
        scheduler = {"max_num_batched_tokens": 16, "max_num_seqs": 1}
        config = producer_and_consumer(60, 60, max_model_len=160, num_workers=2, scheduler={"prefill": scheduler})
        clients = workload(
            request("busy", prompt_tokens=157),
            *(request(name, 11 + 3 * place, prompt_tokens=64) for place, name in enumerate(self.GONE)),
            request("r5", 30, prompt_tokens=16),
            aborts=[(name, 25) for name in self.GONE],
        )
        return play(config, clients, behaviour=behaviour)

    @pytest.mark.parametrize(
        ("switches", "sent_ms", "computes"),
        [
            ("", 271, True),  # four prompts of 64 tokens are computed first, for nobody
            ("mooncake_sender_tasks=release", 271, True),
            ("proxy_abort=both", 480_013, False),  # P has dropped them, and their pulls wait on, r1's since 13
            ("proxy_abort=both mooncake_producer_drop=answer", 111, False),
            ("proxy_abort=both mooncake_sender_tasks=release", 111, False),
        ],
    )
    def test_what_each_piece_of_a_mend_is_worth(self, switches: str, sent_ms: int, computes: bool) -> None:
        self.check(f"vllm-0.33 {switches}", sent_ms, computes=computes)

    def test_ideally_they_are_gone_at_once(self) -> None:
        played = self.check("ideal", 111, computes=False)
        answers = [event for event in played.of("pull.settled") if event.request_id in self.GONE]
        assert {event.cause for event in answers} == {"P dropped the request"}
        assert all(event.time_ns <= 35 * NS_PER_MS for event in answers)

    def check(self, behaviour: str, sent_ms: int, *, computes: bool) -> Play:
        played = self.play(behaviour)
        assert how(played) == {"busy": "finished", **dict.fromkeys(self.GONE, "aborted"), "r5": "finished"}
        (sent,) = played.of("send.started", request_id="r5")
        assert sent.time_ns // NS_PER_MS == sent_ms
        in_vain = [event for event in played.of("request.scheduled", instance="P0") if event.request_id in self.GONE]
        assert sum(event.num_tokens or 0 for event in in_vain) == (4 * 64 if computes else 0)
        assert laws(played) == set()
        assert played.num_free("P0") == played.num_free("D0") == 60
        return played


@pytest.mark.incident("C18")
class TestC18DelayedFreesAndALoadThatWaits:
    """vllm-ascend#15802: of 220 blocks of 128 tokens 181 are kept for D, which does not come; r2 needs 60, of which a
    tier has 50 and the GPU still some. With Mooncake and a CPU tier. (Why D did not come is not told there: here its
    pull is lost.) P stands still, with 82 % of its blocks in use by a request that has finished."""

    FAULT = "mooncake.conn-refused:request=r1"

    def play(self, behaviour: str) -> Play:
        base = both("mooncake,offloading")
        options = base.connector.options
        tier = replace(base.connector.offloading, cpu_bytes_to_use=100 * SLOT)
        base = replace(base, connector=replace(base.connector, options=replace(options, offloading=tier)))  # type: ignore[type-var]
        budget = {"max_num_batched_tokens": 200 * 128}
        config = sized(
            base,
            {"prefill": 220, "decode": 500},
            max_model_len=190 * 128,
            groups=[replace(FULL, block_size=128)],
            scheduler={"prefill": budget, "decode": budget},
        )
        text = [f"t{place}" for place in range(60 * 32)]
        clients = workload(
            request("r0", 0, prompt_tokens=50 * 128, output_tokens=1, text=text),
            request("r1", 1000, prompt_tokens=181 * 128, output_tokens=1),
            request("r2", 2000, prompt_tokens=60 * 128 - 1, output_tokens=1, text=text),
        )
        return play(config, clients, self.FAULT, behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_it_ends_when_the_blocks_expire(self, behaviour: str) -> None:
        """480 s after r1 has been computed."""
        played = self.play(behaviour)
        assert how(played) == {"r0": "finished", "r1": "failed", "r2": "finished"}
        (expired,) = played.of("send.expired")
        assert (expired.request_id, expired.num_blocks) == ("r1", 181)
        (loaded,) = played.of("load.started", instance="P0", request_id="r2")
        assert loaded.time_ns - expired.time_ns == NS_PER_MS
        assert laws(played) == set()

    def test_where_the_consumer_never_gives_up_the_stall_names_who_holds_what(self) -> None:
        played = self.play("pre-50984")
        assert how(played) == {"r0": "finished", "r1": "stalled", "r2": "finished"}
        (stall,) = played.of("request.stalled")
        assert (stall.instance, stall.peer, stall.num_blocks, stall.cause) == ("D0", "P0", 181, "remote KV")

    @pytest.mark.parametrize(("after", "broken"), [(20, set()), (None, {"PROGRESS"})])
    def test_where_nobody_gives_up_at_all(self, after: int | None, broken: set[str]) -> None:
        """The same numbers in steps: R1's blocks are released after 20, or never."""
        say = {"send_after": after} if after is not None else {}
        requests = [
            scripted.request("R1", 181 * 128, max_tokens=1, delay_free=True, **say),
            scripted.request("R2", 60 * 128, 2, max_tokens=1, **load(50 * 128, after=2)),
        ]
        outcome = Outcome(engine(220, 128, max_num_batched_tokens=40_000, max_model_len=30_000), requests)
        assert outcome.laws == broken
        assert outcome.free[10] == 39
        assert [finding.request_id for finding in outcome.findings] == ["R2"] * len(broken)
        assert outcome.finished == ["R1", "R2"][: 2 - len(broken)]
