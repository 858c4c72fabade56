"""Known misbehaviour as data: named switches, and the profiles that set them.

`SWITCHES` is the only vocabulary. A switch is read in one place, mostly where a strategy is chosen at
construction; no code compares versions.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from kvreplay.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Switch:
    """One named behaviour: what it models (a public PR or issue) and its value in each profile."""

    name: str
    values: Mapping[str, str]
    """Value → what the engine does then."""
    models: str
    """Where it is documented in public: PR, issue, or vLLM's file and function."""
    v0_33: str
    ideal: str
    v2026_08: str | None = None
    """Value in the dated profile `vllm-2026-08` (before #50388 and #50984); None: as 0.33."""


def _switch(
    name: str, models: str, values: Mapping[str, str], v0_33: str, ideal: str, v2026_08: str | None = None
) -> Switch:
    for value in (v0_33, ideal, v2026_08 or v0_33):
        assert value in values, f"{name}: {value}"
    return Switch(name, values, models, v0_33, ideal, v2026_08)


SWITCHES: Final[dict[str, Switch]] = {
    switch.name: switch
    for switch in (
        _switch(
            "mooncake_failure",
            "vllm#50984; mooncake_connector.py receive_kv, process_pulling_result",
            {
                "silent": "a failed pull is only logged: its request stays parked for ever (before #50984)",
                "report": "the first failure reports blocks and completion at once; a FINISH that omits a "
                "request still strands it (exactly #50984)",
                "settle": "failure is recorded at once, completion waits for every peer; an omitted request "
                "fails (0.33.0)",
            },
            v0_33="settle",
            ideal="settle",
            v2026_08="silent",
        ),
        _switch(
            "hybrid_failure",
            "vllm#50388; scheduler.py _update_requests_with_invalid_blocks, _handle_invalid_blocks",
            {
                "unpack_crash": "with several KV cache groups, a report of bad blocks kills the engine as soon as it "
                "looks at a request (before #50388)",
                "whole_request": "whoever holds a bad block computes everything again (exactly #50388)",
                "v0_33": "block-level reports with several groups kill the engine; requests must be reported (0.33.0)",
                "ideal": "each request goes back to the longest prefix that is valid in every group",
            },
            v0_33="v0_33",
            ideal="ideal",
            v2026_08="unpack_crash",
        ),
        _switch(
            "request_level_failures",
            "vllm#42461; scheduler.py _handle_failed_recving, KVConnectorTransferResults.failed_recving",
            {
                "off": "only blocks can be reported as failed",
                "on": "a connector can report whole requests (0.33.0)",
            },
            v0_33="on",
            ideal="on",
            v2026_08="off",
        ),
        _switch(
            "waiting_model",
            "scheduler.py: skipped_waiting, since 0.33.0 kv_holding_waiting",
            {
                "skipped_waiting": "whoever was passed over is scanned first, with blocks or without: one that does "
                "not fit hides finished loads behind it",
                "kv_holding": "requests that hold blocks are scanned first (0.33.0)",
            },
            v0_33="kv_holding",
            ideal="kv_holding",
            v2026_08="skipped_waiting",
        ),
        _switch(
            "mooncake_missing_params",
            "mooncake_connector.py update_state_after_alloc",
            {
                "park": "a request without its transfer parameters is parked though no pull starts",
                "prefill": "it is prefilled locally",
            },
            v0_33="park",
            ideal="prefill",
        ),
        _switch(
            "mooncake_producer_drop",
            "mooncake_connector.py record_send_reqs (reqs_not_processed)",
            {
                "forget": "a dropped producer request leaves its waiting pull to time out",
                "answer": "waiting pulls are answered with err_reqs at once",
            },
            v0_33="forget",
            ideal="answer",
        ),
        _switch(
            "mooncake_registration",
            "mooncake_utils.py MooncakeBootstrapServer.register_worker",
            {
                "keep": "what has been registered with a bootstrap server stays: one that outlives a producer refuses "
                "it when it comes back",
                "replace": "a producer that comes back takes the place that it had",
            },
            v0_33="keep",
            ideal="replace",
        ),
        _switch(
            "mooncake_both_flags",
            "mooncake_connector.py on_new_request (kv_both)",
            {
                "shorten": "a request that is pulled and to be handed on loses its last token before it is pulled: "
                "where a state is pulled, it is one token too old",
                "pull": "it is pulled like any other",
            },
            v0_33="shorten",
            ideal="pull",
        ),
        _switch(
            "mooncake_stop_token",
            "mooncake_connector.py request_finished: only FINISHED_LENGTH_CAPPED is sent",
            {
                "drop": "a prefill whose single token is a stop token counts as aborted",
                "send": "its KV is sent like any other",
            },
            v0_33="drop",
            ideal="send",
        ),
        _switch(
            "mooncake_placeholder",
            "mooncake_connector.py send_kv_to_decode: placeholders have no expire_time",
            {
                "leak": "an entry made by a pull for an unknown transfer stays for ever",
                "expire": "it goes when its last waiter goes",
            },
            v0_33="leak",
            ideal="expire",
        ),
        _switch(
            "transfer_integrity",
            "mooncake transfer engine: no checksum on the wire",
            {
                "none": "bytes are trusted",
                "checksum": "each received block is verified before it counts as loaded; the first bad one "
                "fails the load from there",
            },
            v0_33="none",
            ideal="checksum",
        ),
        _switch(
            "transfer_fence",
            "mooncake_connector.py: no attempt id; see vllm#50984's discussion of late writes",
            {
                "none": "a write lands wherever its descriptors say, whoever owns the blocks by then",
                "attempt": "a write whose pull is over is refused",
            },
            v0_33="none",
            ideal="attempt",
        ),
        _switch(
            "pull_wait",
            "mooncake_connector.py receive_kv_from_single_worker: receive timeout per reply",
            {
                "per-reply": "only a missing reply for abort timeout + 60 s ends the wait",
                "bounded": "a producer that is gone is noticed at once; every wait has an end",
            },
            v0_33="per-reply",
            ideal="bounded",
        ),
        _switch(
            "mooncake_lost_pulls",
            "mooncake_connector.py _start_load_kv, handle_new_engine_id: exceptions are not awaited",
            {
                "lose": "an exception before a pull starts is never heard: its requests stay parked, and pulls from "
                "other producers in the same step are not started",
                "fail": "the requests fail, and the producer's addresses are asked for again",
            },
            v0_33="lose",
            ideal="fail",
        ),
        _switch(
            "mooncake_unknown_transfer",
            "mooncake_connector.py record_send_reqs: KeyError, AssertionError; update_state_after_alloc (kv_both)",
            {
                "raise": "a finish or drop of a transfer that nobody announced, or that two requests share, loses "
                "the rest of the step's bookkeeping, unheard",
                "accept": "each is taken for itself; the second request of one transfer gives its blocks back",
            },
            v0_33="raise",
            ideal="accept",
        ),
        _switch(
            "mooncake_broken_send",
            "mooncake_connector.py send_kv_to_decode: sending is not decremented when something raises",
            {
                "leak": "a raising engine call leaves its transfers counted as being sent: they never expire",
                "settle": "they are not being sent any more",
            },
            v0_33="leak",
            ideal="settle",
        ),
        _switch(
            "mooncake_sender_tasks",
            "mooncake_connector.py _sender_worker: a task keeps a pull until its last reply",
            {
                "hold": "a pull that waits for its request keeps one of the producer's sender tasks: enough of them, "
                "and nobody else is served",
                "release": "only pulls that are being written keep one",
            },
            v0_33="hold",
            ideal="release",
        ),
        _switch(
            "mooncake_listener",
            "mooncake_connector.py _mooncake_sender_listener: unpacks two frames",
            {
                "die": "one message of another number of frames ends the producer's listener",
                "survive": "it is counted",
            },
            v0_33="die",
            ideal="survive",
        ),
        _switch(
            "mooncake_null_blocks",
            "mooncake_connector.py _build_transfer_params: null ids are stripped for Mamba groups only",
            {
                "send": "a block that the producer's window has left is sent as the null block's contents",
                "refuse": "the request fails",
            },
            v0_33="send",
            ideal="refuse",
        ),
        _switch(
            "rank_reports",
            "vllm/distributed/kv_transfer/kv_connector/utils.py KVOutputAggregator: counts down, asks nobody",
            {
                "counted": "each report of a rank counts once it arrives, and if it comes twice then twice",
                "acknowledged": "a lost report is sent again, and each counts once",
            },
            v0_33="counted",
            ideal="acknowledged",
        ),
        _switch(
            "mooncake_role_mismatch",
            "mooncake_connector.py: assertions on kv_role in the scheduler's half",
            {
                "die": "a request whose parameters do not go with the instance's role kills the engine",
                "ignore": "its parameters are ignored: it is served without a transfer",
            },
            v0_33="die",
            ideal="ignore",
        ),
        _switch(
            "offload_boundary",
            "vllm#52807; offloading/scheduler.py update_state_after_alloc",
            {
                "from-zero": "a load starts at a group's first real block without a hash, which must not lie below the "
                "computed tokens (before #52807)",
                "from-computed": "that block is looked for from the computed tokens on (exactly #52807)",
                "position": "so it is, and a synchronous load, whose blocks have hashes already, goes by position "
                "(0.33.0)",
            },
            v0_33="position",
            ideal="position",
            v2026_08="from-zero",
        ),
        _switch(
            "offload_state_below_mark",
            "vllm#52807's table; single_type_kv_cache_manager.py MambaManager.remove_skipped_blocks",
            {
                "unhashed": "a load beside a local hit leaves a recurrent group's last block below the computed "
                "tokens real and without a hash, as the older core did",
                "null": "below the computed tokens a recurrent group has null blocks or hashed ones (0.33.0)",
            },
            v0_33="null",
            ideal="null",
        ),
        _switch(
            "offload_eagle_lookup",
            "vllm#52735, vllm#52771; offloading/scheduler.py _lookup",
            {
                "narrow": "every group of a model with a drafter counts as the drafter's, and none is asked for the "
                "chunk that it gives up: stored, never served (before #52771)",
                "widened": "a drafter's group is asked for one chunk more (0.33.0)",
            },
            v0_33="widened",
            ideal="widened",
            v2026_08="narrow",
        ),
        _switch(
            "offload_abort_clamp",
            "vllm#49146; offloading/scheduler.py _build_store_jobs",
            {
                "none": "at its abort a request offers as many chunks as it has keys, also without blocks (before "
                "#49146)",
                "blocks": "no more than its blocks hold (0.33.0)",
            },
            v0_33="blocks",
            ideal="blocks",
        ),
        _switch(
            "offload_readmission",
            "vllm#46014; offloading/scheduler.py get_num_new_matched_tokens",
            {
                "ask": "a preempted request may load while its own stores are in flight: assertion (before #46014)",
                "defer": "it waits for them (0.33.0)",
            },
            v0_33="defer",
            ideal="defer",
        ),
        _switch(
            "offload_no_forward",
            "vllm#41945, vllm#56621; offloading/worker.py, gpu_model_runner.py kv_connector_no_forward",
            {
                "drop": "stores of a step that computes nothing are lost, and their chunks pending for ever",
                "submit": "they are carried out (0.33.0)",
            },
            v0_33="submit",
            ideal="submit",
        ),
        _switch(
            "offload_partial_tail_cap",
            "offloading/scheduler.py _build_partial_tail_store_jobs: boundary <= max_boundary",
            {
                "assert": "a client's max_offload_tokens below a partial tail kills the engine",
                "skip": "the tail is not stored",
            },
            v0_33="assert",
            ideal="skip",
        ),
        _switch(
            "offload_stale_ids",
            "offloading/scheduler.py _update_req_states: only positions from next_stored_chunk_idx on are zeroed",
            {
                "pending": "ids of blocks that others got since are forgotten only where a store is still to come; a "
                "reset, or a request's end, stores foreign bytes from the others",
                "all": "they are forgotten wherever they stand",
            },
            v0_33="pending",
            ideal="all",
        ),
        _switch(
            "offload_window_mask",
            "offloading/scheduler.py, store mask ceil((W-1)/block) against the lookup's ceil(W/block)",
            {
                "short": "of a window of whole blocks and one token one chunk too little is stored to be ever served",
                "lookup": "as much is stored as a lookup wants",
            },
            v0_33="short",
            ideal="lookup",
        ),
        _switch(
            "offload_promotions",
            "v1/kv_offload/tiering/manager.py: prepare_store per promoted key",
            {
                "own-key": "a promotion may evict what its lookup has just found: the request is deferred for ever",
                "request": "it evicts nothing of what its request has found",
            },
            v0_33="own-key",
            ideal="request",
        ),
        _switch(
            "offload_failed_copy",
            "offloading/worker.py get_finished: assert transfer_result.success",
            {
                "assert": "a copy that fails, or is not taken, kills the engine",
                "request": "the load's request fails or is computed, the chunks are forgotten",
            },
            v0_33="assert",
            ideal="request",
        ),
        _switch(
            "offload_acknowledgements",
            "offloading/scheduler.py update_connector_output: pending_count, without a timer",
            {
                "trusted": "each worker's report of a job counts as often as it comes, and is waited for without end",
                "checked": "each counts once, a lost one is repeated, a copy takes no longer than copy_timeout",
            },
            v0_33="trusted",
            ideal="checked",
        ),
        _switch(
            "offload_missing_chunk",
            "v1/kv_offload/cpu/manager.py prepare_load: assertions",
            {
                "assert": "a chunk that has gone between lookup and load kills the engine",
                "miss": "the load fails, its request is computed",
            },
            v0_33="assert",
            ideal="miss",
        ),
        _switch(
            "offload_pending_lookup",
            "offloading/scheduler.py get_num_new_matched_tokens: (None, False) without a limit",
            {
                "wait": "a request waits for ever for a lookup that is never decided",
                "bound": "after lookup_timeout it is computed",
            },
            v0_33="wait",
            ideal="bound",
        ),
        _switch(
            "simple_cpu_lookup",
            "vllm#39702, vllm#42289; v1/simple_kv_offload/manager.py update_state_after_alloc",
            {
                "again": "what was found is looked up once more when the request gets its blocks: if a part has gone, "
                "assertion",
                "pin": "what was found is pinned until then (0.33.0)",
            },
            v0_33="pin",
            ideal="pin",
        ),
        _switch(
            "simple_cpu_copy_error",
            "v1/simple_kv_offload/copy_backend.py: the thread's loop catches nothing",
            {
                "dies": "an exception ends the copy thread: later copies never complete, and nobody is told",
                "fails": "it fails its own job",
            },
            v0_33="dies",
            ideal="fails",
        ),
        _switch(
            "reset_while_loading",
            "scheduler.py reset_prefix_cache: RuntimeError after the running requests have been preempted",
            {
                "raise": "a reset of running requests kills the engine if a load in flight holds blocks",
                "refuse": "it is refused, nothing is lost but what was preempted",
            },
            v0_33="raise",
            ideal="refuse",
        ),
        _switch(
            "invalid_block_scan",
            "scheduler.py _update_requests_with_invalid_blocks with one KV cache group",
            {
                "first_marker": "of those that hold a bad block the first computes it again, the others trust it; its "
                "hash stays meanwhile, and block 0 counts where windows have left it (0.33.0)",
                "every_holder": "whoever holds it goes back to a prefix that it can go on from; nothing built on it "
                "stays cached",
            },
            v0_33="first_marker",
            ideal="every_holder",
        ),
        _switch(
            "unexpected_reports",
            "scheduler.py _update_from_kv_xfer_finished: assertions on the request's status",
            {
                "assert": "a completion of a load or send that the scheduler does not wait for kills the engine; a "
                "failed load without a completion stays parked",
                "ignore": "it is ignored; a failed load is over where the connector will say nothing more of it",
            },
            v0_33="assert",
            ideal="ignore",
        ),
        _switch(
            "failed_load_retry",
            "scheduler.py _update_waiting_for_remote_kv, _inflight_prefills, kv_holding_waiting",
            {
                "in_place": "a request that has lost its load and all blocks keeps its place before block holders, and "
                "its next load must fit beside what is reserved for itself",
                "afresh": "it waits like a new one, at the front",
            },
            v0_33="in_place",
            ideal="afresh",
        ),
        _switch(
            "dropped_samples",
            "async_scheduler.py _update_request_with_output; scheduler.py update_from_output (failed_kv_load_req_ids)",
            {
                "keep": "with overlapping steps the placeholder of a dropped sample stays: the request computes tokens "
                "that it does not have, or waits for one for ever",
                "roll_back": "it goes, with what later steps in flight compute for the request",
            },
            v0_33="keep",
            ideal="roll_back",
        ),
        _switch(
            "aligned_lookahead",
            "scheduler.py _mamba_block_aligned_split, _reserve_prefill_lookahead",
            {
                "stuck": "a chunk that is first cut to a state's boundary and then for the drafter may end as none: "
                "the request is never scheduled again",
                "progress": "it is cut at an earlier boundary, or not at all",
            },
            v0_33="stuck",
            ideal="progress",
        ),
        _switch(
            "block_estimates",
            "single_type_kv_cache_manager.py get_num_blocks_to_allocate; scheduler.py: reserved blocks of loads",
            {
                "short": "null blocks count as held against a window's cap, and a loaded state's block not at all: "
                "loads that were let in cannot go on, or the pool runs dry within schedule()",
                "exact": "what a request will need is counted",
            },
            v0_33="short",
            ideal="exact",
        ),
        _switch(
            "whole_prompt_load",
            "scheduler.py _update_waiting_for_remote_kv: num_computed_tokens - 1 after a load of the whole prompt",
            {
                "go_back": "the last token is computed after all, though a loaded state has it already and a window "
                "may have been loaded without what it attends to",
                "stop_before": "where a group is not of full attention, a load ends before the last token",
            },
            v0_33="go_back",
            ideal="stop_before",
        ),
        _switch(
            "chunked_local_hits",
            "single_type_kv_cache_manager.py ChunkedLocalAttentionManager.find_longest_cache_hit",
            {
                "unseen": "blocks before the last chunk count as computed unseen, though with chunks that are no "
                "multiple of the block size a hit may end among them",
                "whole_chunk": "a hit has all of the chunk that the next token attends to",
            },
            v0_33="unseen",
            ideal="whole_chunk",
        ),
    )
}


@dataclass(frozen=True, slots=True)
class Behaviour:
    """The value of every switch, and the profile it started from."""

    profile: str
    switches: Mapping[str, str]

    def __getitem__(self, name: str) -> str:
        return self.switches[name]

    def with_switch(self, assignment: str) -> "Behaviour":
        """One `NAME=VALUE` from the command line, on top. Raises ConfigError naming the nearest known one."""
        name, separator, value = assignment.partition("=")
        if not separator:
            raise ConfigError(f"--behaviour {assignment}: expected NAME=VALUE")
        switch = SWITCHES.get(name)
        if switch is None:
            hint = nearest(name, SWITCHES, "; kvreplay profiles lists them")
            raise ConfigError(f"--behaviour {assignment}: no switch {name!r}{hint}")
        if value not in switch.values:
            raise ConfigError(f"--behaviour {assignment}: {name} is one of {', '.join(switch.values)}, not {value!r}")
        return Behaviour(self.profile, {**self.switches, name: value})


def nearest(word: str, known: Mapping[str, object] | list[str], otherwise: str = "") -> str:
    """`; did you mean 'x'?` for the closest known word; if none is close, what else to say."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"; did you mean {matches[0]!r}?" if matches else otherwise


def _profiles() -> dict[str, Behaviour]:
    base = {name: switch.v0_33 for name, switch in SWITCHES.items()}

    def derived(profile: str, **changes: str) -> Behaviour:
        return Behaviour(profile, {**base, **changes})

    return {
        "vllm-0.33": derived("vllm-0.33"),
        "pre-50388": derived("pre-50388", hybrid_failure="unpack_crash"),
        "post-50388": derived("post-50388", hybrid_failure="whole_request"),
        "pre-50984": derived("pre-50984", mooncake_failure="silent"),
        "post-50984": derived("post-50984", mooncake_failure="report"),
        "pre-offload-boundary": derived(
            "pre-offload-boundary", offload_boundary="from-zero", offload_state_below_mark="unhashed"
        ),
        "post-offload-boundary": derived(
            "post-offload-boundary", offload_boundary="from-computed", offload_state_below_mark="unhashed"
        ),
        "vllm-2026-08": Behaviour(
            "vllm-2026-08", {name: switch.v2026_08 or switch.v0_33 for name, switch in SWITCHES.items()}
        ),
        "ideal": Behaviour("ideal", {name: switch.ideal for name, switch in SWITCHES.items()}),
    }


PROFILES: Final[dict[str, Behaviour]] = _profiles()
DEFAULT_PROFILE: Final = "vllm-0.33"


def profile(name: str, flag: str = "--profile") -> Behaviour:
    """The profile of this name. Raises ConfigError naming the flag that gave it, and the nearest known one."""
    behaviour = PROFILES.get(name)
    if behaviour is None:
        hint = nearest(name, PROFILES, f", expected one of {', '.join(PROFILES)}")
        raise ConfigError(f"{flag} {name}: unknown profile{hint}")
    return behaviour
