"""Switches of the Mooncake connector."""

from typing import Final

from kvreplay.behaviour.switch import switch

MOONCAKE: Final = (
    switch(
        "mooncake_failure",
        "vllm#50984, vllm#33745; mooncake_connector.py receive_kv, process_pulling_result",
        {
            "received": "a failed pull counts as received, as NixlConnector had it: what follows is computed from "
            "whatever is in the blocks (before #33745)",
            "silent": "a failed pull is only logged: its request stays parked for ever (before #50984)",
            "report": "the first failure reports blocks and completion at once; a FINISH that omits a "
            "request still strands it (exactly #50984)",
            "settle": "failure is recorded at once, completion waits for every peer; an omitted request fails (0.33.0)",
        },
        v0_33="settle",
        ideal="settle",
        v2026_08="silent",
    ),
    switch(
        "mooncake_missing_params",
        "mooncake_connector.py update_state_after_alloc",
        {
            "park": "a request without its transfer parameters is parked though no pull starts",
            "prefill": "it is prefilled locally",
        },
        v0_33="park",
        ideal="prefill",
    ),
    switch(
        "mooncake_producer_drop",
        "mooncake_connector.py record_send_reqs (reqs_not_processed)",
        {
            "forget": "a dropped producer request leaves its waiting pull to time out",
            "answer": "waiting pulls are answered with err_reqs at once",
        },
        v0_33="forget",
        ideal="answer",
    ),
    switch(
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
    switch(
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
    switch(
        "mooncake_stop_token",
        "mooncake_connector.py request_finished: only FINISHED_LENGTH_CAPPED is sent",
        {
            "drop": "a prefill whose single token is a stop token counts as aborted",
            "send": "its KV is sent like any other",
        },
        v0_33="drop",
        ideal="send",
    ),
    switch(
        "mooncake_placeholder",
        "vllm#51236; mooncake_connector.py send_kv_to_decode: placeholders have no expire_time",
        {
            "leak": "an entry made by a pull for an unknown transfer stays for ever",
            "orphan-timeout": "after 60 s in which nobody has announced it, it goes, and its waiters are answered "
            "(exactly vllm#51236)",
            "expire": "it goes when its last waiter goes",
        },
        v0_33="leak",
        ideal="expire",
    ),
    switch(
        "mooncake_late_pulls",
        "aws-do-eks#84, vllm#47021, vllm-ascend#6570: NIXL, where consumers read by themselves",
        {
            "wait": "a pull of blocks that have been given up waits in vain (0.33.0)",
            "read": "it gets what the blocks hold by then, and nobody is told (NIXL, vllm-ascend)",
        },
        v0_33="wait",
        ideal="wait",
    ),
    switch(
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
    switch(
        "transfer_fence",
        "mooncake_connector.py: no attempt id; see vllm#50984's discussion of late writes",
        {
            "none": "a write lands wherever its descriptors say, whoever owns the blocks by then",
            "attempt": "a write whose pull is over is refused",
        },
        v0_33="none",
        ideal="attempt",
    ),
    switch(
        "pull_wait",
        "mooncake_connector.py receive_kv_from_single_worker: receive timeout per reply",
        {
            "first-reply": "nothing ends it once a transfer has begun, of which the first reply tells (sglang#31800)",
            "per-reply": "only a missing reply for abort timeout + 60 s ends the wait",
            "bounded": "a producer that is gone is noticed at once; every wait has an end",
        },
        v0_33="per-reply",
        ideal="bounded",
    ),
    switch(
        "waiting_pulls",
        "sglang#31473; mooncake_connector.py receive_kv: a pull keeps its blocks until it ends",
        {
            "hold": "a pull that its producer has not begun to answer keeps its blocks, whoever waits for room",
            "yield": "where nothing runs and somebody waits for room, it is given up after 10 s and its prompt "
            "computed, if the policy is recompute",
        },
        v0_33="hold",
        ideal="yield",
    ),
    switch(
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
    switch(
        "mooncake_unknown_transfer",
        "mooncake_connector.py record_send_reqs: KeyError, AssertionError; update_state_after_alloc (kv_both)",
        {
            "raise": "a finish or drop of a transfer that nobody announced, or that two requests share, loses "
            "the rest of the step's bookkeeping, unheard",
            "accept": "each is taken for itself; the second request of one transfer gives its blocks back, and nobody "
            "gets the other's",
        },
        v0_33="raise",
        ideal="accept",
    ),
    switch(
        "mooncake_broken_send",
        "mooncake_connector.py send_kv_to_decode: sending is not decremented when something raises",
        {
            "leak": "a raising engine call leaves its transfers counted as being sent: they never expire",
            "settle": "they are not being sent any more",
        },
        v0_33="leak",
        ideal="settle",
    ),
    switch(
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
    switch(
        "mooncake_listener",
        "mooncake_connector.py _mooncake_sender_listener: unpacks two frames",
        {
            "die": "one message of another number of frames ends the producer's listener",
            "survive": "it is counted",
        },
        v0_33="die",
        ideal="survive",
    ),
    switch(
        "mooncake_null_blocks",
        "mooncake_connector.py _build_transfer_params: null ids are stripped for Mamba groups only",
        {
            "send": "a block that the producer's window has left is sent as the null block's contents",
            "refuse": "the request fails",
        },
        v0_33="send",
        ideal="refuse",
    ),
    switch(
        "rank_reports",
        "vllm#21048; vllm/distributed/kv_transfer/kv_connector/utils.py KVOutputAggregator: counts down, asks nobody",
        {
            "any": "one rank's report completes a request for all of them, and the next is of a request that nobody "
            "waits for (before #21048)",
            "counted": "each report of a rank counts once it arrives, and if it comes twice then twice",
            "acknowledged": "a lost report is sent again, and each counts once",
        },
        v0_33="counted",
        ideal="acknowledged",
    ),
    switch(
        "rank_blocks",
        "vllm#19341; v1/core/kv_cache_utils.py get_kv_cache_configs",
        {
            "first": "the pool is as large as the first rank's memory: a block that another rank does not have is "
            "somebody else's there (NixlConnector before #19341)",
            "least": "it has the blocks that every rank has (0.33.0)",
        },
        v0_33="least",
        ideal="least",
    ),
    switch(
        "mooncake_heads",
        "vllm#45330, vllm#43523; mooncake_connector.py _compute_sender_transfer_plan; utils.py TransferTopology",
        {
            "tp_ratio": "what two ranks have in common follows from their tensor parallel sizes alone: no pull fits "
            "where one side has more ranks than heads (NixlConnector before #45330)",
            "distinct": "from the heads that either holds, of which some ranks have the same (0.33.0)",
        },
        v0_33="distinct",
        ideal="distinct",
    ),
    switch(
        "drafter_transfer",
        "vllm#54926, vllm#53779; KVCacheGroupSpec.enable_kv_transfer, KVCacheConfig.transfer_groups",
        {
            "left-out": "groups that are the drafter's alone are not transferred: a consumer's drafter computes each "
            "prompt again before it can propose anything (NixlConnector)",
            "with-the-rest": "they are transferred like any other; both sides must have them (0.33.0)",
        },
        v0_33="with-the-rest",
        ideal="with-the-rest",
    ),
    switch(
        "mooncake_role_mismatch",
        "mooncake_connector.py: assertions on kv_role in the scheduler's half",
        {
            "die": "a request whose parameters do not go with the instance's role kills the engine",
            "ignore": "its parameters are ignored: it is served without a transfer",
        },
        v0_33="die",
        ideal="ignore",
    ),
)
