"""One engine, whole logs down to the blocks: 10 ms a step, blocks of 4 tokens, a message takes 1 ms."""

from kvreplay.events import DETAIL_BLOCKS
from tests.scenarios.stage import Play, play, request, role, single, workload


def whole(played: Play) -> list[str]:
    return [line.removesuffix(" status=10000000") for line in played.story(detail=DETAIL_BLOCKS)]


def plain(*requests: object, num_gpu_blocks: int = 33) -> Play:
    """Step by step: every request's share of every step is told."""
    clients = workload(*requests)  # type: ignore[arg-type]
    return play(single(role(num_gpu_blocks=num_gpu_blocks)), clients, single_steps=True, use_lockstep=False)


def test_a_later_turn_hits_what_the_earlier_one_generated() -> None:
    """12 tokens of turn 0, 11 of them computed, leave two hashed blocks; turn 1 has them and two more tokens."""
    played = plain(
        request("turn0", prompt_tokens=6, output_tokens=6, session="s", turn=0),
        request("turn1", 200, prompt_tokens=14, output_tokens=2, session="s", turn=1),
    )
    assert whole(played) == [
        "0 E0 turn0 request.routed",
        "1 E0 turn0 block.allocated blocks=2 ids=[1, 2]",
        "1 E0 turn0 block.cached blocks=1 ids=[1]",
        "1 E0 - step tokens=6 blocks=1",
        "1 E0 turn0 request.scheduled tokens=6 blocks=0",
        "11 E0 turn0 request.first_token",
        "11 E0 - step tokens=1 blocks=1",
        "11 E0 turn0 request.scheduled tokens=1 blocks=6",
        "21 E0 turn0 block.cached blocks=1 ids=[2]",
        "21 E0 - step tokens=1 blocks=1",
        "21 E0 turn0 request.scheduled tokens=1 blocks=7",
        "31 E0 turn0 block.allocated blocks=1 ids=[3]",
        "31 E0 - step tokens=1 blocks=1",
        "31 E0 turn0 request.scheduled tokens=1 blocks=8",
        "41 E0 - step tokens=1 blocks=1",
        "41 E0 turn0 request.scheduled tokens=1 blocks=9",
        "51 E0 - step tokens=1 blocks=1",
        "51 E0 turn0 request.scheduled tokens=1 blocks=10",
        "61 E0 turn0 block.freed blocks=3 ids=[3, 2, 1]",
        "61 E0 turn0 request.finished tokens=6 status=length",
        "200 E0 turn1 request.routed",
        "201 E0 turn1 block.allocated blocks=2 ids=[3, 4]",
        "201 E0 turn1 block.cached blocks=1 ids=[3]",
        "201 E0 - step tokens=6 blocks=1",
        "201 E0 turn1 request.scheduled tokens=6 blocks=8",
        "211 E0 turn1 request.first_token",
        "211 E0 - step tokens=1 blocks=1",
        "211 E0 turn1 request.scheduled tokens=1 blocks=14",
        "221 E0 turn1 block.freed blocks=4 ids=[4, 3, 2, 1]",
        "221 E0 turn1 request.finished tokens=2 status=length",
    ]


def test_a_request_preempts_itself_and_comes_back_to_its_own_blocks() -> None:
    """17 usable blocks. a takes the last one at 31; at 41 b needs one, is last, and gives up its eight, all hashed.

    It would need 8 + 1 of 8 free blocks until a ends at 71. Then it hits all of them and takes a's block 17, whose
    hash goes: one eviction. Nothing is computed twice.
    """
    played = plain(
        request("a", prompt_tokens=30, output_tokens=7),
        request("b", 5, prompt_tokens=30, output_tokens=7),
        num_gpu_blocks=18,
    )
    assert whole(played) == [
        "0 E0 a request.routed",
        "1 E0 a block.allocated blocks=8 ids=[1, 2, 3, 4, 5, 6, 7, 8]",
        "1 E0 a block.cached blocks=7 ids=[1, 2, 3, 4, 5, 6, 7]",
        "1 E0 - step tokens=30 blocks=1",
        "1 E0 a request.scheduled tokens=30 blocks=0",
        "5 E0 b request.routed",
        "11 E0 a request.first_token",
        "11 E0 b block.allocated blocks=8 ids=[9, 10, 11, 12, 13, 14, 15, 16]",
        "11 E0 b block.cached blocks=7 ids=[9, 10, 11, 12, 13, 14, 15]",
        "11 E0 - step tokens=31 blocks=2",
        "11 E0 a request.scheduled tokens=1 blocks=30",
        "11 E0 b request.scheduled tokens=30 blocks=0",
        "21 E0 b request.first_token",
        "21 E0 a block.cached blocks=1 ids=[8]",
        "21 E0 - step tokens=2 blocks=2",
        "21 E0 a request.scheduled tokens=1 blocks=31",
        "21 E0 b request.scheduled tokens=1 blocks=30",
        "31 E0 a block.allocated blocks=1 ids=[17]",
        "31 E0 b block.cached blocks=1 ids=[16]",
        "31 E0 - step tokens=2 blocks=2",
        "31 E0 a request.scheduled tokens=1 blocks=32",
        "31 E0 b request.scheduled tokens=1 blocks=31",
        "41 E0 b block.freed blocks=8 ids=[16, 15, 14, 13, 12, 11, 10, 9]",
        "41 E0 b request.preempted tokens=32 blocks=8",
        "41 E0 - step tokens=1 blocks=1",
        "41 E0 a request.scheduled tokens=1 blocks=33",
        "51 E0 - step tokens=1 blocks=1",
        "51 E0 a request.scheduled tokens=1 blocks=34",
        "61 E0 a block.cached blocks=1 ids=[17]",
        "61 E0 - step tokens=1 blocks=1",
        "61 E0 a request.scheduled tokens=1 blocks=35",
        "71 E0 a block.freed blocks=9 ids=[17, 8, 7, 6, 5, 4, 3, 2, 1]",
        "71 E0 a request.finished tokens=7 status=length",
        "71 E0 b block.allocated blocks=1 ids=[17]",
        "71 E0 - step tokens=1 blocks=1",
        "71 E0 b request.scheduled tokens=1 blocks=32",
        "81 E0 - step tokens=1 blocks=1",
        "81 E0 b request.scheduled tokens=1 blocks=33",
        "91 E0 - step tokens=1 blocks=1",
        "91 E0 b request.scheduled tokens=1 blocks=34",
        "101 E0 b block.cached blocks=1 ids=[17]",
        "101 E0 - step tokens=1 blocks=1",
        "101 E0 b request.scheduled tokens=1 blocks=35",
        "111 E0 b block.freed blocks=9 ids=[17, 16, 15, 14, 13, 12, 11, 10, 9]",
        "111 E0 b request.finished tokens=7 status=length",
        "111 E0 - block.evicted blocks=1 cause=capacity",
    ]


def test_what_was_evicted_is_computed_again_and_counted() -> None:
    """a leaves 7 hashed blocks of 8; b's 60 tokens take 15 of 17, tails first: only a's first two are left.

    The free queue is then 8 (unhashed), 9 to 17, 7, 6, ..., 1: b takes the first 15 of it, up to block 3.
    """
    text = "abcdefgh"
    played = plain(
        request("a", prompt_tokens=30, output_tokens=1, text=text),
        request("b", 100, prompt_tokens=60, output_tokens=1),
        request("c", 300, prompt_tokens=30, output_tokens=1, text=text),
        num_gpu_blocks=18,
    )
    (share,) = played.of("request.scheduled", request_id="c")
    assert (share.num_tokens, share.num_blocks) == (22, 8)
    (recomputed,) = played.of("tokens.recomputed")
    assert (recomputed.request_id, recomputed.num_tokens, recomputed.cause) == ("c", 20, "eviction")
    assert sum(event.num_blocks or 0 for event in played.of("block.evicted")) == 5 + 6
