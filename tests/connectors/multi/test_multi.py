"""The MultiConnector's rules for choice, delayed frees and reports, over children that do as they are told."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvreplay.connectors.multi.scheduler import MultiMetadata, MultiOutput, MultiScheduler
from kvreplay.connectors.multi.workers import MultiWorkers
from kvreplay.engine.connector import KVConnectorOutput, PlainSchedulerHalf, RequestBlocks
from kvreplay.engine.output import SchedulerOutput
from kvreplay.engine.request import Request
from kvreplay.sim.event_loop import FOREVER_NS
from tests.engine.bench import Bench


class Child(PlainSchedulerHalf):
    requires_kv_delivery = False
    lookup_is_pure = True
    lookup_version = 1

    def __init__(self, *, answer: tuple[int | None, bool] = (0, False), delays: bool = False, meta: Any = None) -> None:  # noqa: ANN401
        self.answer, self.delays, self.meta = answer, delays, meta
        self.calls: list[Any] = []

    def on_new_request(self, request: Request) -> None:
        self.calls.append("new")

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        self.calls.append(("lookup", num_computed_tokens))
        return self.answer

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        self.calls.append(("alloc", blocks.get_block_ids(), num_external_tokens))

    def build_connector_meta(self, out: SchedulerOutput) -> Any:  # noqa: ANN401
        return self.meta

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        return self.delays

    def update_connector_output(self, output: KVConnectorOutput) -> None:
        self.calls.append(output)

    def reset_cache(self) -> bool:
        self.calls.append("reset")
        return self.answer[0] != -1


class Blocks:
    def get_block_ids(self) -> tuple[list[int], ...]:
        return ([1, 2],)

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return ([1, 2],)


def a_request(name: str = "a") -> Request:
    return Bench().make(name, 8)


class TestChoice:
    def test_the_first_with_tokens_is_chosen_and_the_others_are_asked_all_the_same(self) -> None:
        none, first, second = Child(), Child(answer=(8, True)), Child(answer=(16, False))
        multi = MultiScheduler([none, first, second])
        request = a_request()
        assert multi.get_num_new_matched_tokens(request, 4) == (8, True)
        assert second.calls == [("lookup", 4)]
        multi.update_state_after_alloc(request, Blocks(), 8)
        assert [child.calls[-1] for child in (none, first, second)] == [
            ("alloc", ([1, 2],), 0),
            ("alloc", ([1, 2],), 8),
            ("alloc", ([1, 2],), 0),
        ]

    def test_the_peer_is_that_of_the_child_that_has_one(self) -> None:
        remote = Child()
        remote.peer_of = lambda request: "P0"  # type: ignore[method-assign]
        assert MultiScheduler([Child(), remote]).peer_of(a_request()) == "P0"
        assert MultiScheduler([Child(), Child()]).peer_of(a_request()) is None

    def test_who_does_not_know_yet_stops_it_also_behind_a_match(self) -> None:
        last = Child(answer=(4, False))
        multi = MultiScheduler([Child(answer=(8, True)), Child(answer=(None, False)), last])
        assert multi.get_num_new_matched_tokens(a_request(), 0) == (None, False)
        assert not last.calls

    def test_the_choice_lasts_until_the_request_ends(self) -> None:
        child, other = Child(answer=(8, True)), Child()
        multi = MultiScheduler([child, other])
        request = a_request()
        multi.get_num_new_matched_tokens(request, 0)
        child.answer = (0, False)
        multi.get_num_new_matched_tokens(request, 0)
        multi.update_state_after_alloc(request, Blocks(), 3)
        assert child.calls[-1] == ("alloc", ([1, 2],), 3)
        multi.request_finished(request, Blocks())
        multi.update_state_after_alloc(request, Blocks(), 3)
        assert child.calls[-1] == ("alloc", ([1, 2],), 0)


class TestSteps:
    def test_metadata_goes_child_by_child(self) -> None:
        multi = MultiScheduler([Child(), Child(meta="orders")])
        assert multi.build_connector_meta(SchedulerOutput(0)) == MultiMetadata([None, "orders"])
        assert MultiScheduler([Child(), Child()]).build_connector_meta(SchedulerOutput(0)) is None

    def test_the_workers_reports_go_to_their_own_half(self) -> None:
        first, second = Child(), Child()
        mine = KVConnectorOutput(finished_recving=["a"])
        MultiScheduler([first, second]).update_connector_output(MultiOutput(children=[None, mine]))
        assert (first.calls, second.calls) == ([], [mine])

    def test_every_child_is_reset_also_behind_one_that_cannot(self) -> None:
        first, second = Child(answer=(-1, False)), Child()
        assert not MultiScheduler([first, second]).reset_cache()
        assert second.calls == ["reset"]


class Workers:
    def __init__(self, *reports: KVConnectorOutput | None, until_ns: int = 0) -> None:
        self.reports = list(reports)
        self.until_ns = until_ns
        self.calls: list[Any] = []

    def handle_preemptions(self, metadata: Any) -> None:  # noqa: ANN401
        self.calls.append(("flush", metadata))

    def start_load_kv(self, metadata: Any, compute_until_ns: int) -> int:  # noqa: ANN401
        self.calls.append(("load", metadata))
        return self.until_ns

    def has_report(self) -> bool:
        return any(self.reports)

    def gives_back(self) -> bool:
        return any(report.finished_sending for report in self.reports if report is not None)

    def get_finished(self, finished_req_ids: Sequence[str]) -> KVConnectorOutput | None:
        return self.reports.pop(0) if self.reports else None

    def failure_reason(self, request_id: str) -> str | None:
        return None

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class TestWorkers:
    def test_only_who_has_orders_is_called_and_the_slowest_holds_up_the_step(self) -> None:
        idle, quick, stuck = Workers(), Workers(until_ns=5), Workers(until_ns=FOREVER_NS)
        multi = MultiWorkers([idle, quick, stuck])
        metadata = MultiMetadata([None, "q", "s"])
        multi.handle_preemptions(metadata)
        assert multi.start_load_kv(metadata, 0) == FOREVER_NS
        assert (idle.calls, quick.calls) == ([], [("flush", "q"), ("load", "q")])

    def test_reports_are_united(self) -> None:
        one = KVConnectorOutput(finished_recving=["a", "b"], failed_recving=["b"], invalid_block_ids=[3])
        other = KVConnectorOutput(finished_recving=["a"], finished_sending=["c"])
        output = MultiWorkers([Workers(one), Workers(None), Workers(other)]).get_finished([])
        assert output is not None
        assert (output.finished_recving, output.failed_recving) == (["a", "b"], ["b"])
        assert (output.finished_sending, output.invalid_block_ids) == (["c"], [3])
        assert output.children == [one, None, other]
        assert MultiWorkers([Workers(), Workers()]).get_finished([]) is None

    @pytest.mark.incident("M1")
    def test_blocks_come_back_with_the_last_child_that_keeps_them(self) -> None:
        """M1, vllm#18246: two children save the same request; the first one's completion frees nothing."""
        halves = MultiScheduler([Child(delays=True), Child(delays=True), Child()])
        assert halves.request_finished(a_request("r"), Blocks())
        metadata = halves.build_connector_meta(SchedulerOutput(0))
        assert metadata is not None
        sent = KVConnectorOutput(finished_sending=["r"])
        workers = MultiWorkers([Workers(sent, None), Workers(None, sent), Workers()])
        workers.start_load_kv(metadata, 0)
        first, last = workers.get_finished([]), workers.get_finished([])
        assert first is not None
        assert last is not None
        assert (first.finished_sending, last.finished_sending) == ([], ["r"])

    def test_a_load_that_two_children_report_one_after_the_other_is_reported_twice(self) -> None:
        """E7, vllm#53049: only one step's reports are united; the scheduler dies of the second."""
        done = KVConnectorOutput(finished_recving=["a"])
        workers = MultiWorkers([Workers(done, None), Workers(None, done)])
        outputs = [workers.get_finished([]), workers.get_finished([])]
        assert [output.finished_recving for output in outputs if output is not None] == [["a"], ["a"]]
