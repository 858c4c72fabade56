"""What can go wrong around the Mooncake connector: its rows of the fault catalogue.

Sources: vllm/distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py and mooncake_utils.py (0.33.0),
vllm#50984, and Mooncake's transfer_engine_py.cpp. An end of a pull is its consumer (`instance`) or its producer
(`peer`).
"""

from typing import Final

from kvreplay.connectors.mooncake.catalogue.bootstrap import BOOTSTRAP
from kvreplay.connectors.mooncake.catalogue.legs import LEGS
from kvreplay.connectors.mooncake.catalogue.producers import MISFITS, PRODUCERS, STARTS
from kvreplay.connectors.mooncake.catalogue.pulls import PULLS
from kvreplay.connectors.mooncake.catalogue.ranks import LANDING, PEERS, RANKS
from kvreplay.connectors.mooncake.catalogue.replies import REPLIES
from kvreplay.connectors.mooncake.catalogue.writes import WRITES
from kvreplay.sim.catalogue import FaultRow

_SHORT_NAMES: Final = ("timeout", "error-response", "partial-error", "bootstrap-failure", "slow", "corrupt")
"""In the order in which they are told."""
_ALL: Final = (
    *BOOTSTRAP,
    *PULLS,
    *REPLIES,
    *WRITES,
    *PEERS,
    *LANDING,
    *RANKS,
    *PRODUCERS,
    *LEGS,
    *MISFITS,
    *STARTS,
)

ROWS: Final[tuple[FaultRow, ...]] = (
    *sorted((row for row in _ALL if row.short_name), key=lambda row: _SHORT_NAMES.index(row.name)),
    *(row for row in _ALL if not row.short_name),
)
