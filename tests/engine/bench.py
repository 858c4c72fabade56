"""A scheduler on a bench: stepped by hand, with a connector that says what the test wants."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kvreplay.connectors.scripted.connector import RequestScript, ScriptedConnector
from kvreplay.engine.accounts import RecomputeAccounts
from kvreplay.engine.config import SchedulerConfig
from kvreplay.engine.connector import KVConnectorOutput
from kvreplay.engine.log import EngineLog
from kvreplay.engine.options import SchedulerOptions
from kvreplay.engine.output import ModelRunnerOutput, RequestOutput, SchedulerOutput
from kvreplay.engine.recovery import VLLM_0_33_FAILURES, FailureRules
from kvreplay.engine.request import Request, RequestStatus
from kvreplay.engine.scheduler import Scheduler
from kvreplay.events import Event
from kvreplay.kv.attention_managers import make_cache_manager
from kvreplay.kv.block_pool import BlockPool
from kvreplay.kv.content_index import TokenContent, TokenIndex
from kvreplay.kv.specs import FULL, SLIDING_WINDOW, KVCacheGroupSpec
from tests.list_sink import ListSink


class CountingSampler:
    """Tokens 1000, 1001, ...: the n-th that anybody samples. `grows`: contents know only what was sampled."""

    def __init__(self, *, grows: bool = True) -> None:
        self.num_sampled = 0
        self.grows = grows

    def sample(self, request: Request, position: int) -> int:
        token = 1000 + self.num_sampled
        self.num_sampled += 1
        content = request.content
        assert isinstance(content, TokenContent)
        if self.grows:
            content.append(token)
        return token

    def output_hash(self, request: Request) -> int:
        return 0


class Bench:
    """`scripts`: request → what its connector offers; with any, or `has_connector`, there is one."""

    def __init__(
        self,
        *,
        num_gpu_blocks: int = 20,
        block_size: int = 4,
        window: int | None = None,
        scripts: Mapping[str, RequestScript] | None = None,
        has_connector: bool = False,
        recompute: bool = False,
        use_lockstep: bool = False,
        enable_prefix_caching: bool = True,
        retention_interval: int | None = None,
        groups: Sequence[KVCacheGroupSpec] = (),
        kind: type[Scheduler] = Scheduler,
        failure_rules: FailureRules = VLLM_0_33_FAILURES,
        **settings: Any,  # noqa: ANN401 - fields of SchedulerConfig
    ) -> None:
        config = SchedulerConfig(**{"max_num_batched_tokens": 64, "max_num_seqs": 16, "max_model_len": 256, **settings})
        self.sink = ListSink()
        self.pool = BlockPool(num_gpu_blocks, num_keys=64, enable_caching=enable_prefix_caching)
        one_group = KVCacheGroupSpec(
            kind=FULL if window is None else SLIDING_WINDOW, block_size=block_size, sliding_window=window
        )
        self.kv = make_cache_manager(
            groups or [one_group],
            self.pool,
            max_model_len=config.max_model_len,
            max_in_flight_tokens=config.max_num_batched_tokens,
            watermark=config.watermark,
            retention_interval=retention_interval,
        )
        self.log = EngineLog(self.sink, "E0")
        self.accounts = RecomputeAccounts(self.log)
        self._scripts = dict(scripts or {})
        self.connector = (
            ScriptedConnector(_Default(self._scripts), {}) if scripts is not None or has_connector else None
        )
        # In lockstep an output is known ahead, as a replay's is.
        self._sampler = CountingSampler(grows=not use_lockstep)
        self.scheduler = kind(
            config,
            self.kv,
            self.connector,
            self._sampler,
            self.log,
            SchedulerOptions(
                recompute_load_failures=recompute,
                failure_rules=failure_rules,
                use_lockstep=use_lockstep,
                output_is_shared=True,
            ),
            self.accounts,
        )
        self.index = TokenIndex(self.kv.rules.hash_block_size)
        self.output: SchedulerOutput | None = None
        self.outputs: list[RequestOutput] = []

    # -- what the test does ------------------------------------------------------------------------------

    def add(self, request_id: str, prompt: int | Iterable[int], **settings: Any) -> Request:  # noqa: ANN401
        """`prompt`: tokens, or how many that nobody else has."""
        request = self.make(request_id, prompt, **settings)
        self.scheduler.add_request(request)
        return request

    def make(
        self,
        request_id: str,
        prompt: int | Iterable[int],
        *,
        max_tokens: int = 100,
        stop: tuple[int, ...] = (),
    ) -> Request:
        tokens = [hash_free(request_id) + place for place in range(prompt)] if isinstance(prompt, int) else list(prompt)
        content = self.index.content(tokens)
        if not self._sampler.grows:
            for token in range(max_tokens):
                content.append(1000 + token)
        return Request(
            request_id,
            content,
            num_prompt_tokens=len(tokens),
            max_tokens=max_tokens,
            stop_token_ids=stop,
        )

    def schedule(self) -> dict[str, int]:
        """The first half of a step: tokens of each request in it."""
        if self.connector is not None:
            self.connector.step = self.scheduler.step + 1
            self.connector.lookups, self.connector.allocations = [], []
        self.log.step = self.scheduler.step + 1
        self.output = self.scheduler.schedule()
        scheduled = {share.request.request_id: share.num_tokens for share in self.output.shares}
        return scheduled | dict.fromkeys([request.request_id for request in self.scheduler.lockstep], 1)

    def update(
        self,
        *,
        finished: Sequence[str] = (),
        sent: Sequence[str] = (),
        failed: Sequence[str] = (),
        invalid: Sequence[int] = (),
    ) -> dict[str, str | None]:
        """The second half, with what the workers report: finish reason of each request that got a token or ended."""
        assert self.output is not None
        reports = KVConnectorOutput(list(sent), list(finished), list(failed), list(invalid))
        self.outputs = self.scheduler.update_from_output(self.output, ModelRunnerOutput(reports or None))
        return {output.request.request_id: output.finish_reason for output in self.outputs}

    def step(self, **reports: Any) -> dict[str, int]:  # noqa: ANN401 - as `update`
        scheduled = self.schedule()
        self.update(**reports)
        return scheduled

    def steps(self, count: int) -> list[dict[str, int]]:
        return [self.step() for _ in range(count)]

    def abort(self, *request_ids: str) -> None:
        self.scheduler.finish_requests(request_ids, RequestStatus.FINISHED_ABORTED)

    # -- what it then sees -------------------------------------------------------------------------------

    def blocks(self, request_id: str) -> list[int]:
        return self.kv.get_block_ids(request_id)[0]

    def tables(self, request_id: str) -> tuple[list[int], ...]:
        return self.kv.get_block_ids(request_id)

    def computed(self, request_id: str) -> int:
        return self.scheduler.requests[request_id].num_computed_tokens

    def status(self, request_id: str) -> str:
        return self.scheduler.requests[request_id].status.name

    @property
    def running(self) -> list[str]:
        return list(self.scheduler.running)

    @property
    def waiting(self) -> list[str]:
        return [request.request_id for request in self.scheduler.waiting]

    @property
    def holding(self) -> list[str]:
        return [request.request_id for request in self.scheduler.kv_holding_waiting]

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def free_queue(self) -> list[int]:
        queue: list[int] = self.pool.free_queue().tolist()
        return queue

    @property
    def hashed(self) -> list[int]:
        """Blocks in the prefix cache."""
        return [block_id for block_id in range(1, self.pool.num_blocks) if self.pool.keys[block_id] >= 0]

    @property
    def lookups(self) -> list[list[Any]]:
        """(request, local tokens, external tokens, async) of the last step."""
        assert self.connector is not None
        return self.connector.lookups

    def events(self, kind: str) -> list[Event]:
        return [event for event in self.sink.events if event.kind == kind]

    def recomputed(self) -> list[tuple[str | None, int | None, str | None]]:
        return [(event.request_id, event.num_tokens, event.cause) for event in self.events("tokens.recomputed")]


class _Default(dict[str, RequestScript]):
    """No script: nothing is held outside."""

    def __missing__(self, request_id: str) -> RequestScript:
        return RequestScript()


def hash_free(request_id: str) -> int:
    """A first token of its own for every name, the same in each process."""
    return 10_000 * (1 + int.from_bytes(request_id.encode(), "big") % 90_000)


def load(tokens: int, **script: Any) -> RequestScript:  # noqa: ANN401 - fields of RequestScript
    """So many leading tokens are held outside and come asynchronously, once."""
    return RequestScript(**{"tokens": tokens, "is_async": True, "times": 1, **script})


def sync_load(tokens: int, **script: Any) -> RequestScript:  # noqa: ANN401
    return load(tokens, is_async=False, **script)


def deferred(times: int, tokens: int = 0, **script: Any) -> RequestScript:  # noqa: ANN401
    """The lookup is answered "ask later" so often first."""
    return load(tokens, defer=times, **script)
