"""vLLM's connector interface in front of the scripted connector, so that one script plays against both engines."""

# mypy: disable-error-code="import-not-found, import-untyped"
# mypy: allow-subclassing-any

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

from kvreplay.connectors.scripted.connector import ScriptedConnector
from kvreplay.engine.request import RequestStatus


class _NoMetadata(KVConnectorMetadata): ...


class _FinishedRequest:
    """What the script wants to know of a request of vLLM's."""

    def __init__(self, request: Any) -> None:  # noqa: ANN401
        self.request_id: str = request.request_id
        self.status = RequestStatus[request.status.name]


class ScriptedKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Built by vLLM; `script` is set by the driver before the first request.

    `boundary` and `tails` are what vLLM offered in the step, of the states at block boundaries of Mamba groups.
    """

    script: ScriptedConnector

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:  # noqa: ANN401
        super().__init__(vllm_config, role, kv_cache_config)
        settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._requires_kv_delivery = settings["requires_kv_delivery"]
        self._divergent_hits = settings["divergent_hits"]
        self.boundary: dict[str, list[list[int]]] = {}
        self.tails: list[list[Any]] = []

    @property
    def requires_kv_delivery(self) -> bool:
        return bool(self._requires_kv_delivery)

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        return bool(self._divergent_hits)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:  # noqa: ANN401
        return self.script.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:  # noqa: ANN401
        self.script.update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:  # noqa: ANN401
        state = getattr(scheduler_output, "kv_connector_block_state", None)
        if state is not None:
            self.boundary = {key: [list(row) for row in rows] for key, rows in state.boundary_state_offloads.items()}
        return _NoMetadata()

    def register_finished_partial_tail(self, request: Any, block_ids: Any, partial_tail_offloads: Any) -> bool:  # noqa: ANN401
        self.tails.append([request.request_id, [list(row) for row in partial_tail_offloads]])
        return False

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:  # noqa: ANN401
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:  # noqa: ANN401
        return self.script.request_finished(_FinishedRequest(request), block_ids), None  # type: ignore[arg-type]

    def start_load_kv(self, *_: Any, **__: Any) -> None: ...  # noqa: ANN401

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(self, *_: Any, **__: Any) -> None: ...  # noqa: ANN401

    def wait_for_save(self) -> None: ...
