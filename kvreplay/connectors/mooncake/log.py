"""What the connector logs: vLLM's own lines, as a level, a template and its arguments.

Templates are those of vLLM 0.33.0 (mooncake_connector.py, mooncake_utils.py), so that they can be compared with a real
log and found in one.
"""

from typing import Final, Protocol

DEBUG: Final = "DEBUG"
INFO: Final = "INFO"
WARNING: Final = "WARNING"
ERROR: Final = "ERROR"

# Who speaks: vLLM's worker has a loop per half, and threads that block in engine calls.
MAIN: Final = "main"
SENDER: Final = "sender"
RECEIVER: Final = "receiver"
POOL: Final = "pool"


class LogSink(Protocol):
    """Takes a line. `debug`: whether it wants those of that level, which are many."""

    debug: bool

    def __call__(self, thread: str, level: str, template: str, *arguments: object) -> None: ...


# -- consumer ---------------------------------------------------------------------------------------------

PULL_FAILED: Final = "pulling kv_caches for %s failed: %s"
LAYOUT_LOST: Final = "Mooncake prefill %s lost the KV layout; resending it."
QUERY_RETRIED: Final = "Bootstrap query to %s failed on attempt %d/%d (%s: %s); retrying in %.1f seconds"
QUERY_FAILED: Final = "Failed to connect to bootstrap server %s (%s): %s"
PULL_FINISHED: Final = "pulling kv_caches for %s finished"
PULL_SIZE: Final = "MooncakeXferMetadata to %s is %d bytes (%s)."
PULL_SENT: Final = "Sending kv transfer request for %s on path: %s"
PULL_STARTED: Final = "Receiving Mooncake KV for engine %s from producer TP ranks %s and PP ranks %s"

# -- producer ---------------------------------------------------------------------------------------------

NOT_READY: Final = "Timeout waiting for P side ready: %s"
EXPIRED_BEFORE_SENDING: Final = "Request %s expired before sending on P side."
EXPIRED: Final = "Request %s timed out after %d seconds without being sent. Freeing its blocks on the producer side."
SEND_FAILED: Final = "Sending to %s failed (ret=%s) after %s (%d descriptors, %d bytes)"
SEND_DONE: Final = "Sending to %s done, took %s"
SEND_BLOCKS: Final = "Sending kv_caches for request %s (%d blocks) to %s"
SERVED_BY: Final = "Mooncake request %s will be served by %d consumer workers: TP ranks=%s"
PULL_BROKE: Final = "Error processing Mooncake xfer request: %s"
LISTENER_DIED: Final = "Error in Mooncake sender thread: %s. Exiting thread."
GROUP_COUNT: Final = "req %s: KV group count mismatch: local=%d, remote=%d"
BLOCK_COUNT: Final = "req %s: local blocks(%d) < remote blocks(%d) in a KV cache group (is_mamba_group=%s)"
COALESCED: Final = "Mooncake packed coalesce: %s aligned regions -> %s transfer regions."
REGISTER_RETRIED: Final = "Bootstrap registration attempt %d/%d for %s failed with %s: %s. Retrying in %.1fs."
REGISTER_FAILED: Final = "Error registering %s with bootstrap server: %s"

# -- both, and the scheduler's half -----------------------------------------------------------------------

POLLED: Final = "Rank %s, get_finished: %s requests done sending and %s requests done recving"
INVALID_PARAMS: Final = "Got invalid KVTransferParams: %s. This request will not utilize KVTransfer"
NO_TRANSFER_ID: Final = "Missing transfer_id in kv_transfer_params from router!"
LOOKUP: Final = "MooncakeConnector get_num_new_matched_tokens: num_computed_tokens=%s, kv_transfer_params=%s"
AFTER_ALLOC: Final = (
    "MooncakeConnector update_state_after_alloc: req_id=%s num_external_tokens=%s, kv_transfer_params=%s"
)
FINISHED: Final = "MooncakeConnector request_finished, req_id=%s, request_status=%s, kv_transfer_params=%s"
