"""Switches of the scheduler and of the KV cache."""

from typing import Final

from kvreplay.behaviour.switch import switch

ENGINE: Final = (
    switch(
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
    switch(
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
    switch(
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
    switch(
        "reset_while_loading",
        "scheduler.py reset_prefix_cache: RuntimeError after the running requests have been preempted",
        {
            "raise": "a reset of running requests kills the engine if a load in flight holds blocks",
            "refuse": "it is refused, nothing is lost but what was preempted",
        },
        v0_33="raise",
        ideal="refuse",
    ),
    switch(
        "idle_engine",
        "vllm#43433, vllm#46579, local-inference-lab/vllm#191; core.py EngineCore._process_input_queue, "
        "scheduler.py has_requests",
        {
            "steps": "it goes on while a connector keeps blocks of ended requests, or a load has failed (0.33.0)",
            "sleeps_on_frees": "with no request left to run it sleeps until one comes, and blocks that a connector has "
            "given back meanwhile stay taken (before #43433)",
            "sleeps_after_failed_load": "what it has to do is looked at before a failed load is taken in: its request "
            "is taken up again when another comes",
        },
        v0_33="steps",
        ideal="steps",
    ),
    switch(
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
    switch(
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
    switch(
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
    switch(
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
    switch(
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
    switch(
        "padded_decodes",
        "scheduler.py schedule: pad_spec_decode, long_prefill_token_threshold",
        {
            "capped": "an admitted request with one token left is padded for drafts, and then cut to the threshold of "
            "long prefills: where that is smaller the engine dies",
            "whole": "it is not padded where that would be cut",
        },
        v0_33="capped",
        ideal="whole",
    ),
    switch(
        "load_lookahead",
        "vllm#57104; scheduler.py schedule: _spec_decode_step_blocks in reserved_blocks",
        {
            "ignored": "a load is admitted where its blocks fit, though the step after it needs more for drafts: when "
            "two have landed, neither may have room, and parked requests are no victims (before 0.33.0)",
            "reserved": "it must leave room for a step with drafts, its own and everyone's in flight (0.33.0)",
        },
        v0_33="reserved",
        ideal="reserved",
        v2026_08="ignored",
    ),
    switch(
        "block_estimates",
        "single_type_kv_cache_manager.py get_num_blocks_to_allocate; scheduler.py: reserved blocks of loads",
        {
            "short": "null blocks count as held against a window's cap, a loaded state's block not at all, and what "
            "a load's own request needs behind it only with scheduler_reserve_full_isl: loads that were let in cannot "
            "go on, or the pool runs dry within schedule()",
            "exact": "what a request will need is counted, also behind what it loads",
        },
        v0_33="short",
        ideal="exact",
    ),
    switch(
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
    switch(
        "aborted_loads",
        "sglang#24527, sglang#32564, sglang#35049; scheduler.py _free_request: delay_free_blocks",
        {
            "free": "a request that ends while it is being loaded gives its blocks back at once: what lands in them "
            "then may be somebody else's (SGLang)",
            "hold": "they come back with the load's report (0.33.0)",
        },
        v0_33="hold",
        ideal="hold",
    ),
    switch(
        "zeroed_loads",
        "vllm#45357, vllm#47373, vllm#48481; gpu_model_runner.py: zeroing of new blocks",
        {
            "late": "with overlapping steps blocks for a load are zeroed as well, behind the step in progress: what "
            "has landed in them by then is lost (before #47373)",
            "never": "they are left to the load; what a failed one has not brought is zeroed afterwards (0.33.0)",
        },
        v0_33="never",
        ideal="never",
    ),
    switch(
        "hybrid_adoption",
        "vllm#33775, vllm#44409; kv_cache_coordinator.py allocate_new_computed_blocks",
        {
            "per_group": "each group takes its hit, and then blocks for a load, before the next one does: it may be "
            "given what the next one hits (before #33775)",
            "hits_first": "all groups' hits are taken before any block for a load (0.33.0)",
        },
        v0_33="hits_first",
        ideal="hits_first",
    ),
    switch(
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
