"""Switches of what is in front of the engines: the proxy, and their API servers."""

from typing import Final

from kvreplay.behaviour.switch import switch

CLUSTER: Final = (
    switch(
        "proxy_abort",
        "sglang#28236; mooncake_connector_proxy.py: only the decode leg's stream is closed",
        {
            "serving": "of a client that goes away only the instance that serves it hears: its producer computes the "
            "prompt in vain",
            "both": "the producer drops it, too",
        },
        v0_33="serving",
        ideal="both",
    ),
    switch(
        "proxy_failed_prefill",
        "aibrix#2289, sglang#9726; vLLM's mooncake_connector_proxy.py sends both legs, and nobody waits for the "
        "producer's answer",
        {
            "ignore": "the consumer's leg goes on waiting when the producer's has failed; ideally the producer tells "
            "it, and the policy decides",
            "cancel": "the consumer's leg is cancelled when the producer's fails",
        },
        v0_33="ignore",
        ideal="ignore",
    ),
    switch(
        "proxy_legs",
        "sglang#31473; vLLM's mooncake_connector_proxy.py (at once), toy_proxy_server.py of NixlConnector (in turn)",
        {
            "at-once": "both legs are sent at once: a consumer reserves room for what its producer has not begun, and "
            "where they take two requests in opposite orders each holds what the other waits for, until a timeout",
            "in-turn": "the consumer's leg is sent when the producer's has ended: room is reserved in the order in "
            "which prompts are ready",
        },
        v0_33="at-once",
        ideal="at-once",
    ),
    switch(
        "rejected_requests",
        "vllm#50425; entrypoints/generate/base/serving.py _with_kv_transfer_rejection_cleanup, "
        "AsyncLLM.notify_kv_transfer_request_rejected",
        {
            "forget": "of a request that is refused or cancelled before the consumer's engine has it nobody tells the "
            "producer, whose blocks for it stay until their time is up",
            "release": "the engine is handed it as aborted, and asks for none of the blocks: they are free at once "
            "(0.33.0)",
            "answer": "so it is, and the producer's engine is handed what is refused there: who asks it is answered at "
            "once",
        },
        v0_33="release",
        ideal="answer",
    ),
)
