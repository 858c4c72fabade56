"""One worker's counters, with vLLM's names (mooncake/stats.py)."""

from dataclasses import dataclass, field

import numpy as np

_MIB = 2**20
_NS_PER_MS = 1e6


@dataclass(slots=True)
class MooncakeStats:
    """Successes are counted by producers only, failed receives by consumers only. One entry per engine call."""

    transfer_duration: list[int] = field(default_factory=list)
    """ns"""
    bytes_transferred: list[int] = field(default_factory=list)
    num_descriptors: list[int] = field(default_factory=list)
    num_failed_transfers: int = 0
    num_failed_recvs: int = 0
    num_kv_expired_reqs: int = 0

    def record_transfer(self, *, duration_ns: int, num_bytes: int, num_descriptors: int) -> None:
        self.transfer_duration.append(duration_ns)
        self.bytes_transferred.append(num_bytes)
        self.num_descriptors.append(num_descriptors)

    @property
    def num_successful_transfers(self) -> int:
        return len(self.transfer_duration)

    def drain(self) -> "MooncakeStats":
        """What has been counted since the last call."""
        drained = MooncakeStats(
            self.transfer_duration,
            self.bytes_transferred,
            self.num_descriptors,
            self.num_failed_transfers,
            self.num_failed_recvs,
            self.num_kv_expired_reqs,
        )
        self.transfer_duration, self.bytes_transferred, self.num_descriptors = [], [], []
        self.num_failed_transfers = self.num_failed_recvs = self.num_kv_expired_reqs = 0
        return drained

    def reduce(self) -> dict[str, int | float]:
        """The figures of vLLM's periodic log line."""
        num_transfers = self.num_successful_transfers
        figures: dict[str, int | float] = dict.fromkeys(
            (
                "Num successful transfers",
                "Avg xfer time (ms)",
                "P90 xfer time (ms)",
                "Avg MB per transfer",
                "Throughput (MB/s)",
                "Avg number of descriptors",
            ),
            0,
        )
        if num_transfers:
            duration_ms = np.asarray(self.transfer_duration) / _NS_PER_MS
            total_mb, total_ms = sum(self.bytes_transferred) / _MIB, float(duration_ms.sum())
            figures = {
                "Num successful transfers": num_transfers,
                "Avg xfer time (ms)": round(total_ms / num_transfers, 3),
                "P90 xfer time (ms)": round(float(np.percentile(duration_ms, 90)), 3),
                "Avg MB per transfer": round(total_mb / num_transfers, 3),
                "Throughput (MB/s)": round(total_mb / total_ms * 1e3, 3) if total_ms > 0 else 0.0,
                "Avg number of descriptors": round(sum(self.num_descriptors) / num_transfers, 1),
            }
        figures["Num failed transfers"] = self.num_failed_transfers
        figures["Num failed recvs"] = self.num_failed_recvs
        figures["Num KV expired reqs"] = self.num_kv_expired_reqs
        return figures
