"""The sampler of a replay: how many tokens there are is known, which ones follows from what was read."""

from typing import Final

from kvreplay.engine.request import Request
from kvreplay.kv.content_index import RequestContent, mix64

ANY_TOKEN: Final = -1
"""The id of every token."""


class TraceSampler:
    """Samples no token ids; the output's digest is that of right contents, unless something wrong was read."""

    def sample(self, request: Request, position: int) -> int:
        return ANY_TOKEN

    def output_hash(self, request: Request) -> int:
        return expected_output_hash(request.content, request.num_output_tokens, request.output_taint)


def expected_output_hash(content: object, num_output_tokens: int, taint: int = 0) -> int:
    assert isinstance(content, RequestContent)
    digest = content.output_digest(num_output_tokens)
    return mix64(digest, taint) if taint else digest
