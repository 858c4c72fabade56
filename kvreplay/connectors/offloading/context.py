"""What a manager is told of a request, and what it keeps with it (vLLM: v1/kv_offload/base.py, ReqContext)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, NamedTuple

from kvreplay.connectors.offloading.access import RequestAccess

MEDIA: Final = ("CPU", "STORAGE")
LOCALITIES: Final = ("LOCAL", "REMOTE")
MAX_PROMOTIONS: Final = 1000
"""In as many attempts the engine, too, takes a request for livelocked."""


class OffloadPolicy(Enum):
    """What a request's tiers want of it (vLLM: OffloadPolicy)."""

    CHUNK_LEVEL = "newly computed chunks; what was hit is there already"
    REQUEST_LEVEL = "all of its chunks, prefix hits included"


class TierMatcher(NamedTuple):
    """None matches anything, and anything matches an unknown medium or locality."""

    medium: str | None = None
    locality: str | None = None

    def matches(self, medium: str | None, locality: str | None) -> bool:
        return (self.medium is None or medium is None or self.medium == medium) and (
            self.locality is None or locality is None or self.locality == locality
        )


@dataclass(frozen=True, slots=True)
class TierFilter:
    """Which secondary tiers a request may load from (`kv_load_tiers`)."""

    matchers: tuple[TierMatcher, ...] = (TierMatcher(),)

    def allows(self, medium: str | None, locality: str | None) -> bool:
        return any(matcher.matches(medium, locality) for matcher in self.matchers)


ALL_TIERS: Final = TierFilter()


@dataclass(slots=True)
class RequestContext:
    """One request, as managers and tiers see it."""

    req_id: str
    load_tiers: TierFilter = ALL_TIERS
    access: RequestAccess | None = None
    """What the CPU manager has seen of it."""
    rank: int | None = None
    """Its place among requests in an LRU tier; drawn at its first store or load."""
    rank_generation: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    num_attempts: int = 0
    """Copies from a secondary tier that its lookups have ordered, and steps in which there was no room for any."""
    num_orders: int = 0
    """Chunks that its lookups have asked for from a secondary tier, whether or not there was room for them."""
    left_alone_in: tuple[int, int, int] | None = None
    """In which situation it was left alone, because its lookups only go in circles, until another comes."""
    is_bounded: bool = False
    """Its lookup is given up after a time: whatever goes round in circles has an end."""

    @property
    def is_going_in_circles(self) -> bool:
        """No lookup needs so many: they evict each other, or leave each other no room."""
        return self.num_attempts > MAX_PROMOTIONS and not self.is_bounded


def context_of(req_id: str, params: Mapping[str, Any] | None) -> RequestContext:
    """From a request's `kv_transfer_params`."""
    raw = params.get("kv_load_tiers") if params else None
    return RequestContext(req_id, ALL_TIERS if raw is None else _parse_filter(raw), params=params or {})


def _parse_filter(raw: object) -> TierFilter:
    """Entries that make no sense are left out; if none is left, nothing was asked for, unless the list was empty."""
    if not isinstance(raw, list):
        return ALL_TIERS
    matchers = tuple(matcher for matcher in map(_parse_matcher, raw) if matcher is not None)
    return TierFilter(matchers) if matchers or not raw else ALL_TIERS


def _parse_matcher(entry: object) -> TierMatcher | None:
    if not isinstance(entry, dict):
        return None
    medium, locality = entry.get("medium"), entry.get("locality")
    if _is_unknown(medium, MEDIA) or _is_unknown(locality, LOCALITIES):
        return None
    return TierMatcher(medium.upper() if medium else None, locality.upper() if locality else None)


def _is_unknown(value: object, known: tuple[str, ...]) -> bool:
    return value is not None and not (isinstance(value, str) and value.upper() in known)
