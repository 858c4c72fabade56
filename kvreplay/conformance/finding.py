"""What goes wrong in a vector's workload."""

from typing import NamedTuple


class VectorFinding(NamedTuple):
    """One breach of one law in one step. Unknown places are None."""

    step: int
    checker: str
    detail: str
    request_id: str | None = None
    block_id: int | None = None
    group: int | None = None
