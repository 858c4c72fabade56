"""Switches of the tiers behind the GPU."""

from typing import Final

from kvreplay.behaviour.switch import switch

OFFLOAD: Final = (
    switch(
        "offload_boundary",
        "vllm#52807; offloading/scheduler.py update_state_after_alloc",
        {
            "from-zero": "a load starts at a group's first real block without a hash, which must not lie below the "
            "computed tokens (before #52807)",
            "from-computed": "that block is looked for from the computed tokens on (exactly #52807)",
            "position": "so it is, and a synchronous load, whose blocks have hashes already, goes by position (0.33.0)",
        },
        v0_33="position",
        ideal="position",
        v2026_08="from-zero",
    ),
    switch(
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
    switch(
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
    switch(
        "offload_hit_groups",
        "vllm#41712; offloading/scheduler.py _lookup",
        {
            "attention": "what attention groups have counts as hit, whether the state that goes with it is there or "
            "not",
            "all": "a hit ends where every group can go on (0.33.0)",
        },
        v0_33="all",
        ideal="all",
    ),
    switch(
        "offload_abort_clamp",
        "vllm#49146; offloading/scheduler.py _build_store_jobs",
        {
            "none": "at its abort a request offers as many chunks as it has keys, also without blocks (before #49146)",
            "blocks": "no more than its blocks hold (0.33.0)",
        },
        v0_33="blocks",
        ideal="blocks",
    ),
    switch(
        "offload_readmission",
        "vllm#46014; offloading/scheduler.py get_num_new_matched_tokens",
        {
            "ask": "a preempted request may load while its own stores are in flight: assertion (before #46014)",
            "defer": "it waits for them (0.33.0)",
        },
        v0_33="defer",
        ideal="defer",
    ),
    switch(
        "offload_no_forward",
        "vllm#41945, vllm#56621; offloading/worker.py, gpu_model_runner.py kv_connector_no_forward",
        {
            "drop": "stores of a step that computes nothing are lost, and their chunks pending for ever",
            "submit": "they are carried out (0.33.0)",
        },
        v0_33="submit",
        ideal="submit",
    ),
    switch(
        "offload_partial_tail_cap",
        "offloading/scheduler.py _build_partial_tail_store_jobs: boundary <= max_boundary",
        {
            "assert": "a client's max_offload_tokens below a partial tail kills the engine",
            "skip": "the tail is not stored",
        },
        v0_33="assert",
        ideal="skip",
    ),
    switch(
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
    switch(
        "offload_window_mask",
        "offloading/scheduler.py, store mask ceil((W-1)/block) against the lookup's ceil(W/block)",
        {
            "short": "of a window of whole blocks and one token one chunk too little is stored to be ever served",
            "lookup": "as much is stored as a lookup wants",
        },
        v0_33="short",
        ideal="lookup",
    ),
    switch(
        "offload_promotions",
        "v1/kv_offload/tiering/manager.py: prepare_store per promoted key",
        {
            "own-key": "a promotion may evict what its lookup has just found: the request is deferred for ever",
            "request": "it evicts nothing of what its request has found",
        },
        v0_33="own-key",
        ideal="request",
    ),
    switch(
        "offload_failed_copy",
        "offloading/worker.py get_finished: assert transfer_result.success",
        {
            "assert": "a copy that fails, or is not taken, kills the engine",
            "request": "the load's request fails or is computed, the chunks are forgotten",
        },
        v0_33="assert",
        ideal="request",
    ),
    switch(
        "offload_acknowledgements",
        "offloading/scheduler.py update_connector_output: pending_count, without a timer",
        {
            "trusted": "each worker's report of a job counts as often as it comes, and is waited for without end",
            "checked": "each counts once, a lost one is repeated, a copy takes no longer than copy_timeout",
        },
        v0_33="trusted",
        ideal="checked",
    ),
    switch(
        "offload_missing_chunk",
        "v1/kv_offload/cpu/manager.py prepare_load: assertions",
        {
            "assert": "a chunk that has gone between lookup and load kills the engine",
            "miss": "the load fails, its request is computed",
        },
        v0_33="assert",
        ideal="miss",
    ),
    switch(
        "offload_pending_lookup",
        "offloading/scheduler.py get_num_new_matched_tokens: (None, False) without a limit",
        {
            "wait": "a request waits for ever for a lookup that is never decided",
            "bound": "after lookup_timeout it is computed",
        },
        v0_33="wait",
        ideal="bound",
    ),
    switch(
        "offload_keys",
        "vllm#44250, vllm#45549, sglang#24638; v1/kv_offload/base.py make_offload_key",
        {
            "tokens": "a chunk is known by its tokens alone: who has other weights (an adapter), or may not see it, "
            "hits it all the same (LMCache, before the adapter's name was in the key)",
            "namespace": "by its block's hash, and so by its request's namespace and salt, too (0.33.0)",
        },
        v0_33="namespace",
        ideal="namespace",
    ),
    switch(
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
    switch(
        "simple_cpu_lost_hash",
        "v1/simple_kv_offload/manager.py _process_store_completion: assert primary_hash is not None",
        {
            "fatal": "a block that has lost its hash (to a failed load) while it was stored kills the engine",
            "forgets": "it is not entered",
        },
        v0_33="fatal",
        ideal="forgets",
    ),
    switch(
        "simple_cpu_copy_error",
        "v1/simple_kv_offload/copy_backend.py: the thread's loop catches nothing",
        {
            "dies": "an exception ends the copy thread: later copies never complete, and nobody is told",
            "fails": "it fails its own job",
        },
        v0_33="dies",
        ideal="fails",
    ),
)
