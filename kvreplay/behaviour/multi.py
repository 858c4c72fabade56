"""Switches of several connectors beside each other."""

from typing import Final

from kvreplay.behaviour.switch import switch

MULTI: Final = (
    switch(
        "multi_losers",
        "vllm-ascend#13474; multi_connector.py update_state_after_alloc",
        {
            "load": "a connector whose hit was not taken is not told so: it loads what it has offered into the same "
            "blocks",
            "told": "it is told of no tokens, and has its producer let go of the request's blocks (0.33.0)",
        },
        v0_33="told",
        ideal="told",
    ),
)
