"""Where sampled tokens come from."""

from typing import Protocol

from kvreplay.engine.request import Request


class Sampler(Protocol):
    def sample(self, request: Request, position: int) -> int:
        """The token at `position` of prompt and output; the request's content knows of it afterwards."""
        ...

    def output_hash(self, request: Request) -> int:
        """A digest of the request's output tokens so far (64 bits)."""
        ...
