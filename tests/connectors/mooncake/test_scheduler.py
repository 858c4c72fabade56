"""The scheduler's half: what it promises, records and tells the workers."""

from typing import Any, cast

import pytest

from kvreplay.behaviour import profile
from kvreplay.connectors.mooncake.scheduler import PULL_PARAMETERS, MooncakeScheduler
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata
from kvreplay.engine.connector import SchedulerConnector
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.errors import EngineFatal
from kvreplay.kv.content import Content
from kvreplay.kv.specs import MAMBA, MAMBA_ALIGN, SLIDING_WINDOW, SLIDING_WINDOW_MLA, KVCacheGroupSpec
from tests.connectors.mooncake.pair import behaviour

FULL_GROUP = KVCacheGroupSpec()
WINDOW_GROUP = KVCacheGroupSpec(kind=SLIDING_WINDOW, sliding_window=32)
STATE_GROUP = KVCacheGroupSpec(kind=MAMBA, mamba_cache_mode=MAMBA_ALIGN)
LENGTH = RequestStatus.FINISHED_LENGTH_CAPPED
STOPPED = RequestStatus.FINISHED_STOPPED
ABORTED = RequestStatus.FINISHED_ABORTED


class Blocks:
    def __init__(self, *groups: list[int]) -> None:
        self.groups = groups

    def get_block_ids(self) -> tuple[list[int], ...]:
        return self.groups

    def get_unhashed_block_ids_all_groups(self) -> tuple[list[int], ...]:
        return self.groups


def scheduler(role: str, *groups: KVCacheGroupSpec, **switches: str) -> MooncakeScheduler:
    return MooncakeScheduler(role, groups or (FULL_GROUP,), behaviour(**switches))


def request(request_id: str, status: RequestStatus, params: dict[str, object] | None) -> Request:
    made = Request(request_id, cast(Content, None), num_prompt_tokens=40, max_tokens=1, kv_transfer_params=params)
    made.status = status
    return made


def prefill_leg(status: RequestStatus = RequestStatus.WAITING, **changes: object) -> Request:
    return request("p1", status, {"do_remote_decode": True, "transfer_id": "X1", **changes})


def decode_leg(status: RequestStatus = RequestStatus.WAITING, **changes: object) -> Request:
    params = {
        "do_remote_prefill": True,
        "transfer_id": "X1",
        "remote_engine_id": "P0#0",
        "remote_bootstrap_addr": "http://P0:8998",
    }
    return request("d1", status, {**params, **changes})


def metadata_of(half: MooncakeScheduler) -> MooncakeConnectorMetadata:
    metadata = half.build_connector_meta()
    assert metadata is not None
    return metadata


@pytest.mark.parametrize(("engine_id", "peer"), [("P0#0", "P0"), ("P0#2", "P0"), (None, None), (7, None)])
def test_the_peer_is_the_instance_behind_the_remote_engine_id(engine_id: object, peer: str | None) -> None:
    half = scheduler("kv_consumer")
    assert half.peer_of(decode_leg(remote_engine_id=engine_id)) == peer
    assert half.peer_of(prefill_leg()) is None
    assert half.peer_of(request("r", RequestStatus.WAITING, None)) is None


class TestConsumer:
    def test_everything_that_is_not_here_is_promised(self) -> None:
        half = scheduler("kv_consumer")
        assert half.get_num_new_matched_tokens(decode_leg(), 0) == (40, True), "the partial block too"
        assert half.get_num_new_matched_tokens(decode_leg(), 16) == (24, True)
        assert half.get_num_new_matched_tokens(decode_leg(), 40) == (0, False)
        assert half.get_num_new_matched_tokens(request("r", RequestStatus.WAITING, None), 0) == (0, False)

    def test_a_pull_is_asked_for_once(self) -> None:
        half, leg = scheduler("kv_consumer"), decode_leg()
        half.update_state_after_alloc(leg, Blocks([4, 5, 6]), 40)
        half.update_state_after_alloc(leg, Blocks([4, 5, 6]), 0)
        pull = metadata_of(half).reqs_to_recv["P0#0"]["d1"]
        assert (pull.transfer_id, pull.local_block_ids) == ("X1", [[4, 5, 6]])
        assert half.build_connector_meta() is None
        assert half.get_num_new_matched_tokens(leg, 0) == (0, False)

    def test_the_window_is_clipped_to_its_blocks_and_one(self) -> None:
        half = scheduler("kv_consumer", FULL_GROUP, WINDOW_GROUP)
        half.update_state_after_alloc(decode_leg(), Blocks([1, 2, 3, 4, 5], [6, 7, 8, 9]), 80)
        pull = metadata_of(half).reqs_to_recv["P0#0"]["d1"]
        assert pull.local_block_ids == [[1, 2, 3, 4, 5], [7, 8, 9]]

    def test_a_full_hit_only_releases(self) -> None:
        half = scheduler("kv_consumer")
        half.update_state_after_alloc(decode_leg(), Blocks([4, 5, 6]), 0)
        assert metadata_of(half).reqs_to_recv["P0#0"]["d1"].local_block_ids == []

    def test_so_does_an_abort_while_queued(self) -> None:
        half = scheduler("kv_consumer")
        assert half.request_finished(decode_leg(ABORTED), Blocks([])) is False
        assert metadata_of(half).reqs_to_recv["P0#0"]["d1"].local_block_ids == []

    def test_a_normal_finish_says_nothing(self) -> None:
        half, leg = scheduler("kv_consumer"), decode_leg(LENGTH)
        half.update_state_after_alloc(leg, Blocks([4]), 16)
        half.build_connector_meta()
        assert half.request_finished(leg, Blocks([4])) is False
        assert half.build_connector_meta() is None

    @pytest.mark.parametrize("missing", PULL_PARAMETERS)
    def test_f14_missing_parameters_park_the_request(self, missing: str) -> None:
        half, leg = scheduler("kv_consumer"), decode_leg()
        del cast(dict[str, Any], leg.kv_transfer_params)[missing]
        assert half.get_num_new_matched_tokens(leg, 0) == (40, True)
        half.update_state_after_alloc(leg, Blocks([4, 5, 6]), 40)
        assert half.build_connector_meta() is None
        assert half.num_invalid_params == 1

    @pytest.mark.parametrize("missing", PULL_PARAMETERS)
    def test_ideally_it_is_prefilled_here(self, missing: str) -> None:
        half, leg = scheduler("kv_consumer", mooncake_missing_params="prefill"), decode_leg(ABORTED)
        del cast(dict[str, Any], leg.kv_transfer_params)[missing]
        assert half.get_num_new_matched_tokens(leg, 0) == (0, False)
        assert half.request_finished(leg, Blocks([])) is False
        half.update_state_after_alloc(leg, Blocks([4, 5, 6]), 0)
        assert half.build_connector_meta() is None


class TestProducer:
    def test_announced_then_ready(self) -> None:
        half, leg = scheduler("kv_producer"), prefill_leg()
        assert half.get_num_new_matched_tokens(leg, 0) == (0, False)
        half.update_state_after_alloc(leg, Blocks([1, 2, 3]), 0)
        assert metadata_of(half).reqs_to_send == {"p1": ("X1", [])}
        leg.status = LENGTH
        assert half.request_finished(leg, Blocks([1, 2, 3])) is True
        assert metadata_of(half).reqs_to_send == {"p1": ("X1", [[1, 2, 3]])}

    @pytest.mark.parametrize("status", [ABORTED, RequestStatus.FINISHED_ERROR, STOPPED])
    def test_any_other_end_drops_it(self, status: RequestStatus) -> None:
        half = scheduler("kv_producer")
        assert half.request_finished(prefill_leg(status), Blocks([1, 2, 3])) is False
        assert list(metadata_of(half).reqs_not_processed) == ["X1"]

    def test_ideally_a_stop_token_is_an_end_like_any_other(self) -> None:
        half = scheduler("kv_producer", mooncake_stop_token="send")
        assert half.request_finished(prefill_leg(STOPPED), Blocks([1])) is True

    def test_null_blocks_of_a_window_are_kept(self) -> None:
        half = scheduler("kv_producer", FULL_GROUP, WINDOW_GROUP)
        half.request_finished(prefill_leg(LENGTH), Blocks([1, 2, 3, 4], [0, 0, 5, 6]))
        assert metadata_of(half).reqs_to_send["p1"][1] == [[1, 2, 3, 4], [0, 5, 6]]

    def test_nothing_is_kept_without_blocks_or_transfer_id(self) -> None:
        half = scheduler("kv_producer")
        assert half.request_finished(prefill_leg(LENGTH), Blocks([])) is False
        nameless = prefill_leg(LENGTH, transfer_id=None)
        half.update_state_after_alloc(nameless, Blocks([1]), 0)
        assert half.request_finished(nameless, Blocks([1])) is False
        assert half.build_connector_meta() is None
        assert half.num_invalid_params == 1


class TestRoles:
    def test_a_misrouted_request_kills_the_engine(self) -> None:
        producer, consumer = scheduler("kv_producer"), scheduler("kv_consumer")
        for call in (
            lambda: producer.get_num_new_matched_tokens(decode_leg(), 0),
            lambda: producer.update_state_after_alloc(decode_leg(), Blocks([1]), 0),
            lambda: producer.request_finished(decode_leg(ABORTED), Blocks([])),
            lambda: consumer.update_state_after_alloc(prefill_leg(), Blocks([1]), 0),
            lambda: consumer.request_finished(prefill_leg(ABORTED), Blocks([])),
        ):
            with pytest.raises(EngineFatal) as death:
                call()
            assert (death.value.exception, death.value.message) == ("AssertionError", "")

    def test_without_a_transfer_id_a_misrouted_abort_is_harmless(self) -> None:
        assert scheduler("kv_producer").request_finished(decode_leg(ABORTED, transfer_id=None), Blocks([])) is False

    def test_kv_both_pulls_what_could_go_either_way_and_never_announces_it(self) -> None:
        half, leg = scheduler("kv_both"), decode_leg(LENGTH, do_remote_decode=True)
        half.update_state_after_alloc(leg, Blocks([4]), 16)
        assert metadata_of(half).reqs_to_send == {}
        assert half.request_finished(leg, Blocks([4])) is True

    @pytest.mark.parametrize(("role", "delivers"), [("kv_producer", True), ("kv_consumer", False), ("kv_both", True)])
    def test_producers_must_deliver(self, role: str, delivers: bool) -> None:
        half: SchedulerConnector = MooncakeScheduler(role, (FULL_GROUP,), profile("ideal"))
        assert half.requires_kv_delivery is delivers
        assert half.lookup_is_pure


class TestMisroutedRequests:
    """Profile `ideal` serves them as if nobody had asked for a transfer."""

    def test_a_prefill_leg_on_a_consumer(self) -> None:
        half, leg = scheduler("kv_consumer", mooncake_role_mismatch="ignore"), prefill_leg(LENGTH)
        half.on_new_request(leg)
        half.update_state_after_alloc(leg, Blocks([1]), 0)
        assert half.request_finished(leg, Blocks([1])) is False
        assert half.build_connector_meta() is None

    def test_a_decode_leg_on_a_producer(self) -> None:
        half, leg = scheduler("kv_producer", mooncake_role_mismatch="ignore"), decode_leg(ABORTED)
        half.on_new_request(leg)
        assert half.get_num_new_matched_tokens(leg, 0) == (0, False)
        half.update_state_after_alloc(leg, Blocks([1]), 0)
        assert half.request_finished(leg, Blocks([1])) is False
        assert half.build_connector_meta() is None

    def test_requests_of_the_right_role_are_left_alone(self) -> None:
        half, leg = scheduler("kv_consumer", mooncake_role_mismatch="ignore"), decode_leg()
        half.on_new_request(leg)
        assert half.get_num_new_matched_tokens(leg, 0) == (40, True)


class TestStates:
    """A model of Mamba states needs the one before the last token."""

    def test_the_producer_leaves_the_last_token_out_once(self) -> None:
        half, leg = scheduler("kv_producer", FULL_GROUP, STATE_GROUP), prefill_leg()
        leg.max_tokens = 7
        for _ in range(2):
            half.on_new_request(leg)
        assert (leg.num_prompt_tokens, leg.num_tokens, leg.max_tokens) == (39, 39, 1)

    def test_the_consumer_computes_it(self) -> None:
        half = scheduler("kv_consumer", FULL_GROUP, STATE_GROUP)
        assert half.get_num_new_matched_tokens(decode_leg(), 16) == (23, True)
        assert half.get_num_new_matched_tokens(decode_leg(), 39) == (0, False), "a full hit: nothing to pull"

    def test_a_request_that_reads_no_cache_keeps_it(self) -> None:
        half, leg = scheduler("kv_producer", FULL_GROUP, STATE_GROUP), prefill_leg()
        leg.skip_reading_prefix_cache = True
        half.on_new_request(leg)
        assert leg.num_prompt_tokens == 40

    def test_windows_that_are_replayed_need_it_too(self) -> None:
        replayed = KVCacheGroupSpec(kind=SLIDING_WINDOW_MLA, sliding_window=32, bounded_replay=True)
        half = scheduler("kv_consumer", FULL_GROUP, replayed)
        assert half.get_num_new_matched_tokens(decode_leg(), 0) == (39, True)

    def test_other_models_do_not(self) -> None:
        half, leg = scheduler("kv_producer", FULL_GROUP, WINDOW_GROUP), prefill_leg()
        half.on_new_request(leg)
        assert leg.num_prompt_tokens == 40


def test_blocks_of_another_number_of_groups_are_fatal() -> None:
    with pytest.raises(EngineFatal, match=r"^ValueError: Expected 1 KV cache groups, got 2\.$"):
        scheduler("kv_producer").request_finished(prefill_leg(LENGTH), Blocks([1], [2]))


class TestLines:
    """What vLLM logs, with its arguments."""

    def test_parameters_that_are_missing(self) -> None:
        lines: list[tuple[object, ...]] = []
        consumer = MooncakeScheduler("kv_consumer", (FULL_GROUP,), behaviour(), Lines(lines))
        leg = decode_leg()
        assert leg.kv_transfer_params is not None
        del leg.kv_transfer_params["remote_engine_id"]
        consumer.update_state_after_alloc(leg, Blocks([1]), 16)
        producer = MooncakeScheduler("kv_producer", (FULL_GROUP,), behaviour(), Lines(lines))
        producer.update_state_after_alloc(prefill_leg(transfer_id=None), Blocks([1]), 0)
        (first, params), (second,) = lines
        assert first == "Got invalid KVTransferParams: %s. This request will not utilize KVTransfer"
        assert isinstance(params, dict)
        assert params["do_remote_prefill"] is True, "as it was, before it was acted upon"
        assert second == "Missing transfer_id in kv_transfer_params from router!"


class Lines:
    debug = False

    def __init__(self, lines: list[tuple[object, ...]]) -> None:
        self._lines = lines

    def __call__(self, thread: str, level: str, template: str, *arguments: object) -> None:
        assert (thread, level) == ("main", "WARNING")
        self._lines.append((template, *arguments))
