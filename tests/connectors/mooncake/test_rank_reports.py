"""Reports of ranks as messages: lost, doubled, late, or in another rank's name."""

from dataclasses import replace

import pytest

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake.rank_group import RankGroup, RankReport
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.ids import NS_PER_S
from kvreplay.sim.envelope import RANK_REPORT, Delivery, Envelope
from tests.connectors.mooncake.engines import Engines
from tests.connectors.mooncake.pair import ALL_KINDS, behaviour

ACKNOWLEDGED = behaviour(rank_reports="acknowledged")


def pulled(engines: Engines) -> Engines:
    """`engines` with a wire that sees the reports of their ranks, and a pull on its way."""
    engines.wire.kinds = ALL_KINDS | {RANK_REPORT}
    engines.finish()
    engines.pull()
    return engines


def of_rank(rank: int, envelope: Envelope) -> bool:
    return envelope.source == f"D0/rank/{rank}"


class TestUnfaulted:
    def test_reports_of_one_poll_are_heard_together(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1)))
        engines.run()
        assert [report.finished_recving for report in engines.d.reports] == [["d1"]]
        reports = [envelope for envelope in engines.wire.sent if envelope.kind == RANK_REPORT]
        assert [(envelope.source, envelope.request_ids) for envelope in reports] == [
            ("D0/rank/0", ("d1",)),
            ("D0/rank/1", ("d1",)),
        ]
        assert len({envelope.conversation for envelope in reports}) == 2

    def test_a_single_rank_reports_without_messages(self) -> None:
        engines = pulled(Engines())
        engines.run()
        assert engines.d.finished() == ["d1"]
        assert RANK_REPORT not in engines.wire.kinds_sent()


class TestFaulted:
    def test_a_lost_report_leaves_the_request_unfinished(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1)))
        engines.wire.transforms[RANK_REPORT] = lambda envelope: [] if of_rank(1, envelope) else [envelope]
        engines.run()
        assert engines.d.reports == []

    def test_ideally_it_is_sent_again(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1), switches=ACKNOWLEDGED))
        lost: list[Envelope] = []

        def lose_three(envelope: Envelope) -> list[Envelope]:
            if of_rank(1, envelope) and len(lost) < 3:
                lost.append(envelope)
                return []
            return [envelope]

        engines.wire.transforms[RANK_REPORT] = lose_three
        engines.run()
        assert engines.d.finished() == ["d1"]
        assert engines.loop.now_ns == 3 * NS_PER_S

    def test_a_new_report_is_sent_for_the_first_time_whatever_waits_beside_it(self) -> None:
        """Rank 1 is cut off from the start; what it reports 2.5 s later has not been sent before."""
        engines = pulled(Engines((1, 1), (2, 1), switches=ACKNOWLEDGED))
        attempts: list[tuple[str, int]] = []

        def lose(envelope: Envelope) -> list[Envelope]:
            if of_rank(1, envelope):
                attempts.append((envelope.conversation.rpartition("/")[2], envelope.attempt))
                return []
            return [envelope]

        engines.wire.transforms[RANK_REPORT] = lose
        engines.run(2.5)
        group = engines.d.workers
        assert isinstance(group, RankGroup)
        group._send(group._next_report(1, KVConnectorOutput(finished_recving=["d2"])), 0)
        engines.run(1)
        assert attempts == [("1", 0), ("1", 1), ("1", 2), ("2", 0), ("1", 3), ("2", 1)]

    def test_a_rank_that_is_cut_off_does_not_keep_the_run_alive_for_ever(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1), switches=ACKNOWLEDGED))
        engines.wire.transforms[RANK_REPORT] = lambda envelope: [] if of_rank(1, envelope) else [envelope]
        engines.run()
        assert engines.d.reports == []

    def test_a_doubled_report_completes_a_request_that_another_rank_still_receives(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1)))
        engines.wire.delays_s["pull.reply"] = [0, 5]
        engines.wire.transforms[RANK_REPORT] = lambda envelope: [envelope, envelope]
        engines.run(1)
        assert engines.d.finished() == ["d1"]

    def test_ideally_it_counts_once(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1), switches=ACKNOWLEDGED))
        engines.wire.delays_s["pull.reply"] = [0, 5]
        engines.wire.transforms[RANK_REPORT] = lambda envelope: [envelope, envelope]
        engines.run(1)
        assert engines.d.finished() == []
        engines.run()
        assert engines.d.finished() == ["d1"]

    @pytest.mark.parametrize(("switches", "seconds"), [(behaviour(), 0), (ACKNOWLEDGED, 5)])
    def test_a_report_in_another_ranks_name(self, switches: Behaviour, seconds: int) -> None:
        engines = pulled(Engines((1, 1), (2, 1), switches=switches))
        engines.wire.delays_s["pull.reply"] = [0, 5]

        def speak_for_both(envelope: Envelope) -> list[Envelope]:
            report: RankReport = envelope.payload
            forged = RankReport(1 - report.rank, 1, report.output)
            return [envelope, replace(envelope, payload=forged)] if report.rank == 0 else [envelope]

        engines.wire.transforms[RANK_REPORT] = speak_for_both
        engines.run(6)
        settled = [event.time_ns for event in engines.sink.events if event.kind == "pull.settled"]
        assert settled == [0, 5 * NS_PER_S]
        assert engines.d.finished()[0] == "d1"
        assert engines.d.reports_at[0] == seconds * NS_PER_S

    def test_a_late_report_is_heard_when_it_comes(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1)))
        intercept = engines.wire.intercept

        def late(envelope: Envelope, now_ns: int) -> list[Delivery] | None:
            if envelope.kind == RANK_REPORT and of_rank(1, envelope):
                return [Delivery(envelope, 7 * NS_PER_S)]
            return intercept(envelope, now_ns)

        engines.wire.intercept = late  # type: ignore[method-assign]
        engines.run()
        assert engines.d.reports_at == [7 * NS_PER_S]

    @pytest.mark.parametrize(("switches", "order"), [(behaviour(), ["done", "bad"]), (ACKNOWLEDGED, ["bad", "done"])])
    def test_a_completion_that_overtakes_its_failure(self, switches: Behaviour, order: list[str]) -> None:
        """Ideally it waits: wrong blocks would be taken for right ones."""
        engines = Engines((1, 1), (2, 1), switches=switches)
        engines.wire.kinds = ALL_KINDS | {RANK_REPORT}
        engines.wire.delays_s[RANK_REPORT] = [7, 0, 0, 0]
        group = engines.d.workers
        assert isinstance(group, RankGroup)
        done = KVConnectorOutput(finished_recving=["d1"])
        for rank, output in ((0, KVConnectorOutput(invalid_block_ids=[4])), (0, done), (1, done)):
            group._send(group._next_report(rank, output), 0)
        engines.run()
        said = [
            word
            for report in engines.d.reports
            for word, ids in (("bad", report.invalid_block_ids), ("done", report.finished_recving))
            if ids
        ]
        assert said == order

    def test_a_dead_engine_hears_nothing(self) -> None:
        engines = pulled(Engines((1, 1), (2, 1), switches=ACKNOWLEDGED))
        engines.wire.transforms[RANK_REPORT] = lambda envelope: []
        engines.run(0.5)
        engines.d.workers.shutdown()
        engines.run()
        assert engines.d.reports == []
