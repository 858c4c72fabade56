"""The scheduler's half of the Mooncake connector: what to pull, what to keep for a puller."""

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar

from kvreplay.behaviour import Behaviour
from kvreplay.connectors.mooncake import log
from kvreplay.connectors.mooncake.addresses import instance_of, printable
from kvreplay.connectors.mooncake.log import LogSink
from kvreplay.connectors.mooncake.structs import MooncakeConnectorMetadata, PullReqMeta
from kvreplay.engine.connector import PlainSchedulerHalf, RequestBlocks
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.errors import EngineFatal, engine_asserts
from kvreplay.kv.specs import FULL, MAMBA, MLA

PULL_PARAMETERS: Final = ("remote_engine_id", "remote_bootstrap_addr", "transfer_id")
"""Without any of these in `kv_transfer_params` there is nobody to pull from."""

_Blocks = Sequence[Sequence[int]]


class TransferGroup(Protocol):
    """What the connector must know of a KV cache group (`kv.specs.KVCacheGroupSpec`)."""

    @property
    def kind(self) -> str: ...
    @property
    def block_size(self) -> int: ...
    @property
    def sliding_window(self) -> int | None: ...
    @property
    def prefix_replay_tokens(self) -> int:
        """Last tokens of a hit that are computed again, because no cache holds their window."""
        ...

    @property
    def drafter_only(self) -> bool: ...


class MooncakeScheduler(PlainSchedulerHalf):
    """One engine's. With role `kv_both` it is neither producer nor consumer only, and does both.

    It changes `kv_transfer_params`, as vLLM does: `do_remote_prefill` is cleared when it has been acted upon. A model
    with states, or with windows that are replayed, needs what was before the last token: the producer leaves that
    token out, the consumer computes it.
    """

    lookup_is_pure = True

    def __init__(
        self,
        role: str,
        groups: Sequence[TransferGroup],
        behaviour: Behaviour,
        log_line: LogSink | None = None,
    ) -> None:
        self.is_kv_producer = role == "kv_producer"
        self.is_kv_consumer = role == "kv_consumer"
        self.requires_kv_delivery = not self.is_kv_consumer
        self.num_invalid_params = 0
        """Requests that lacked parameters, for which vLLM logs a warning."""
        self._log = log_line
        self._num_groups = len(groups)
        groups = transfer_groups(groups, behaviour)
        self._lacks_drafters = len(groups) < self._num_groups
        self._window_blocks = _window_blocks(groups)
        self._leaves_last_token = any(group.kind == MAMBA or group.prefix_replay_tokens > 0 for group in groups)
        if behaviour["whole_prompt_load"] == "stop_before":
            # The window of the last token, which is computed here, begins before that of the next one.
            self._leaves_last_token |= any(group.kind not in (FULL, MLA) for group in groups)
        self._prefills_without_params = behaviour["mooncake_missing_params"] == "prefill"
        self._pulls_whole = behaviour["mooncake_both_flags"] == "pull"
        self._ignores_misrouted = behaviour["mooncake_role_mismatch"] == "ignore"
        self._sent_statuses = {RequestStatus.FINISHED_LENGTH_CAPPED}
        if behaviour["mooncake_stop_token"] == "send":
            self._sent_statuses.add(RequestStatus.FINISHED_STOPPED)
        self._reqs_need_recv: dict[str, tuple[Request, _Blocks]] = {}
        self._reqs_need_send: dict[str, tuple[Request, _Blocks]] = {}
        self._reqs_not_processed: dict[str, None] = {}

    def on_new_request(self, request: Request) -> None:
        params = request.kv_transfer_params
        if not params:
            return
        if self._ignores_misrouted:
            if self.is_kv_producer:
                params.pop("do_remote_prefill", None)
            if self.is_kv_consumer:
                params.pop("do_remote_decode", None)
        is_pulled = self._pulls_whole and params.get("do_remote_prefill")
        if params.get("do_remote_decode") and self._leaves_last_token and not is_pulled:
            _leave_last_token_out(request, params)

    def peer_of(self, request: Request) -> str | None:
        engine_id = (request.kv_transfer_params or {}).get("remote_engine_id")
        return instance_of(printable(engine_id)) if isinstance(engine_id, str) else None

    def loads_every_group(self, request_id: str) -> bool:
        return True

    def leaves_drafter_out(self, request_id: str) -> bool:
        return self._lacks_drafters

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        params = request.kv_transfer_params
        self._debug(log.LOOKUP, num_computed_tokens, params)
        if not params or not params.get("do_remote_prefill"):
            return 0, False
        engine_asserts(not self.is_kv_producer)
        if self._prefills_without_params and not _has_pull_parameters(params):
            return 0, False
        num_tokens = request.num_prompt_tokens
        if self._leaves_last_token and num_tokens > 1:
            num_tokens -= 1
        # Not rounded to blocks: the last one is pulled too, however full it is.
        num_tokens -= num_computed_tokens
        return (num_tokens, True) if num_tokens > 0 else (0, False)

    def update_state_after_alloc(self, request: Request, blocks: RequestBlocks, num_external_tokens: int) -> None:
        params = request.kv_transfer_params
        self._debug(log.AFTER_ALLOC, request.request_id, num_external_tokens, params)
        if not params:
            return
        if params.get("do_remote_prefill"):
            engine_asserts(not self.is_kv_producer)
            if _has_pull_parameters(params):
                unhashed = blocks.get_unhashed_block_ids_all_groups() if num_external_tokens > 0 else ()
                self._reqs_need_recv[request.request_id] = (request, self._clip(unhashed))
            else:
                self._refuse_params(log.INVALID_PARAMS, dict(params))
            params["do_remote_prefill"] = False
        elif params.get("do_remote_decode"):
            engine_asserts(not self.is_kv_consumer)
            if params.get("transfer_id"):
                self._reqs_need_send[request.request_id] = (request, [])
            else:
                self._refuse_params(log.NO_TRANSFER_ID)

    def _refuse_params(self, template: str, *arguments: object) -> None:
        self.num_invalid_params += 1
        if self._log is not None:
            self._log(log.MAIN, log.WARNING, template, *arguments)

    def _debug(self, template: str, *arguments: object) -> None:
        if self._log is not None and self._log.debug:
            self._log(log.MAIN, log.DEBUG, template, *arguments)

    def build_connector_meta(self, out: object = None) -> MooncakeConnectorMetadata | None:
        if not (self._reqs_need_recv or self._reqs_need_send or self._reqs_not_processed):
            return None
        metadata = MooncakeConnectorMetadata()
        if not self.is_kv_producer:
            for req_id, (request, block_ids) in self._reqs_need_recv.items():
                params = _params_of(request)
                for name in PULL_PARAMETERS:
                    # Only a pull without blocks comes here unchecked: its request was aborted in the queue.
                    if name not in params:
                        raise EngineFatal("KeyError", f"'{name}'")
                of_engine = metadata.reqs_to_recv.setdefault(_hashed(params["remote_engine_id"]), {})
                of_engine[req_id] = PullReqMeta(
                    d_req_id=req_id,
                    transfer_id=params["transfer_id"],
                    local_block_ids=block_ids,
                    remote_engine_id=params["remote_engine_id"],
                    remote_bootstrap_addr=params["remote_bootstrap_addr"],
                )
            self._reqs_need_recv.clear()
        if not self.is_kv_consumer:
            for req_id, (request, block_ids) in self._reqs_need_send.items():
                metadata.reqs_to_send[req_id] = (_params_of(request)["transfer_id"], block_ids)
            self._reqs_need_send.clear()
            metadata.reqs_not_processed = self._reqs_not_processed
            self._reqs_not_processed = {}
        return metadata

    def request_finished(self, request: Request, blocks: RequestBlocks) -> bool:
        params = request.kv_transfer_params
        self._debug(log.FINISHED, request.request_id, int(request.status), params)
        if not params or not params.get("transfer_id"):
            return False
        if params.get("do_remote_prefill"):
            # It never got blocks. The producer's are released by asking for none.
            engine_asserts(not self.is_kv_producer)
            params["do_remote_prefill"] = False
            if self._prefills_without_params and not _has_pull_parameters(params):
                return False
            self._reqs_need_recv[request.request_id] = (request, [])
            return False
        if not params.get("do_remote_decode"):
            return False
        engine_asserts(not self.is_kv_consumer)
        if request.status not in self._sent_statuses:
            self._reqs_not_processed[_hashed(params["transfer_id"])] = None
            return False
        block_ids = blocks.get_block_ids()
        if not any(block_ids):
            return False
        self._reqs_need_send[request.request_id] = (request, self._clip(block_ids))
        return True

    def _clip(self, block_ids: Sequence[Sequence[int]]) -> _Blocks:
        """Of a sliding-window group only the window's blocks, and one for the overlap, are worth moving; of groups that
        are left out, the last ones, none."""
        if len(block_ids) == 0:
            return []
        if len(block_ids) != self._num_groups:
            raise EngineFatal("ValueError", f"Expected {self._num_groups} KV cache groups, got {len(block_ids)}.")
        return [
            of_group[:] if num_blocks is None else of_group[-num_blocks:]
            for of_group, num_blocks in zip(block_ids, self._window_blocks, strict=False)
        ]


_Group = TypeVar("_Group", bound=TransferGroup)


def transfer_groups(groups: Sequence[_Group], behaviour: Behaviour) -> Sequence[_Group]:
    """Those that are transferred (vLLM: KVCacheConfig.transfer_groups). A drafter's own are behind all others."""
    if behaviour["drafter_transfer"] == "with-the-rest":
        return groups
    return [group for group in groups if not group.drafter_only]


def _window_blocks(groups: Sequence[TransferGroup]) -> list[int | None]:
    counts: list[int | None] = []
    for group in groups:
        if group.sliding_window is None:
            counts.append(None)
        else:
            counts.append(-(-group.sliding_window // group.block_size) + 1)
    return counts


def _leave_last_token_out(request: Request, params: dict[str, Any]) -> None:
    """So that the producer ends in the state before it; once, however often the request is taken up again."""
    if params.get("_p_side_truncated") or request.num_prompt_tokens <= 1 or request.skip_reading_prefix_cache:
        return
    request.num_prompt_tokens -= 1
    request.num_tokens -= 1
    request.max_tokens = 1
    params["_p_side_truncated"] = True


def _has_pull_parameters(params: dict[str, Any]) -> bool:
    # Present is enough: a null goes to the producer, which refuses it.
    return all(name in params for name in PULL_PARAMETERS)


def _params_of(request: Request) -> dict[str, Any]:
    assert request.kv_transfer_params is not None
    return request.kv_transfer_params


def _hashed(parameter: Any) -> Any:  # noqa: ANN401 - JSON
    """A request's parameter, where vLLM looks it up in a table: the engine dies of one that is a list or an object."""
    if isinstance(parameter, (list, dict)):
        raise EngineFatal("TypeError", f"unhashable type: {type(parameter).__name__!r}")
    return parameter
