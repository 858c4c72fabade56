"""A worker's place in its engine, and which ranks of a peer it talks to."""

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


def target_ranks(own_rank: int, own_size: int, peer_size: int) -> list[int]:
    """The peer's tensor-parallel ranks that one rank talks to; both sides use the same rule.

    Raises ValueError if the sizes do not divide.
    """
    larger, smaller = max(own_size, peer_size), min(own_size, peer_size)
    if smaller <= 0 or larger % smaller:
        raise ValueError(f"tensor parallel sizes {own_size} and {peer_size} do not divide")
    if own_size >= peer_size:
        return [own_rank // (own_size // peer_size)]
    ratio = peer_size // own_size
    return [own_rank * ratio + place for place in range(ratio)]
