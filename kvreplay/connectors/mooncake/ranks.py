"""A worker's place in its engine, and which ranks of a peer it talks to."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """One worker of tensor-parallel by pipeline-parallel by data-parallel ones."""

    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    dp_rank: int = 0

    @property
    def rank(self) -> int:
        """Its number within its engine."""
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def num_ranks(self) -> int:
        return self.tp_size * self.pp_size


def all_ranks(tp_size: int, pp_size: int, dp_rank: int = 0) -> list[Ranks]:
    """The workers of one engine, by their number."""
    return [
        Ranks(tp_rank=tp_rank, tp_size=tp_size, pp_rank=pp_rank, pp_size=pp_size, dp_rank=dp_rank)
        for pp_rank in range(pp_size)
        for tp_rank in range(tp_size)
    ]


def tp_ratio(own_size: int, peer_size: int) -> int:
    """Own ranks for each of the peer's; negative: the peer's for each own (vLLM: TransferTopology.tp_ratio).

    Raises ValueError, with vLLM's words, if the sizes do not divide, and ZeroDivisionError as it would.
    """
    if own_size >= peer_size:
        if own_size % peer_size:
            raise ValueError(
                f"Local tensor parallel size {own_size} is not divisible by remote tensor parallel size {peer_size}."
            )
        return own_size // peer_size
    if peer_size % own_size:
        raise ValueError(
            f"Remote tensor parallel size {peer_size} is not divisible by local tensor parallel size {own_size}."
        )
    return -(peer_size // own_size)


def target_ranks(own_rank: int, own_size: int, peer_size: int) -> list[int]:
    """The peer's tensor-parallel ranks that one rank talks to; both sides use the same rule.

    Raises as `tp_ratio` does.
    """
    ratio = tp_ratio(own_size, peer_size)
    if ratio > 0:
        return [own_rank // ratio]
    return [own_rank * -ratio + place for place in range(-ratio)]


def select_peers(own: Ranks, peers: Mapping[int, Mapping[int, object]], tp_size: int) -> dict[int, list[int]]:
    """Of a producer's ranks, by tensor- and pipeline-parallel rank, those that have a part of what this rank needs.
    `tp_size`: how many tensor-parallel ranks the producer is believed to have.

    Raises as `target_ranks` does, and KeyError where one that is needed is not among them.
    """
    selected: dict[int, list[int]] = {}
    for tp_rank in target_ranks(own.tp_rank, own.tp_size, tp_size):
        by_pp_rank = peers[tp_rank]
        # With as many stages as this engine its own stage is enough; otherwise layer names tell what is whose.
        is_same_cut = own.pp_size == len(by_pp_rank) and own.pp_rank in by_pp_rank
        selected[tp_rank] = [own.pp_rank] if is_same_cut else sorted(by_pp_rank)
    return selected
