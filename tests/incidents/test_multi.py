"""Public incidents of two connectors beside each other: one takes what the other was to bring, or to keep."""

import pytest

from kvreplay.replay.offload import Offload
from tests.incidents.clusters import crashes, laws, sized
from tests.scenarios.stage import Play, play, request, workload
from tests.scenarios.test_multi import both

TEXT = [f"t{place}" for place in range(32)]


@pytest.mark.incident("M3")
@pytest.mark.incident("J6")
class TestJ6TheStoreWinsAndTheProducerSendsAllTheSame:
    """vllm-ascend#13474; vllm#20609: of a prompt of 65 tokens the consumer's tier has 64, in 4 blocks; the producer has
    5. Mooncake is asked for by the consumer: its pull is the plan that the producer of the incident made itself.
    """

    def play(self, behaviour: str) -> Play:
        config = sized(both("offloading,mooncake"), 12, max_model_len=100)
        clients = workload(
            request("a", 0, prompt_tokens=64, text=TEXT), request("b", 1000, prompt_tokens=65, text=TEXT)
        )
        return play(config, clients, "cache.reset:at=900ms,what=gpu,instance=D0", behaviour=behaviour)

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_the_producer_is_asked_for_nothing_and_lets_go(self, behaviour: str) -> None:
        played = self.play(behaviour)
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        loads = played.of("load.started", instance="D0", request_id="b")
        assert [(event.num_tokens, event.num_blocks, event.status) for event in loads] == [(64, 4, "CPU")]
        assert [event.num_blocks for event in played.of("pull.sent", request_id="b")] == [0]
        assert not played.of("send.started", request_id="b")
        assert not played.of("send.expired")
        assert played.num_free("P0") == 12

    def test_else_each_block_has_two_writers(self) -> None:
        """And the second one's completion is of a request that runs."""
        played = self.play("vllm-0.33 multi_losers=load")
        assert [event.num_blocks for event in played.of("pull.sent", request_id="b")] == [4]
        assert played.of("send.started", request_id="b")
        assert crashes(played) == [("D0", "finished_recving of b, which is RUNNING")]


@pytest.mark.incident("M1")
class TestM1SentAndStillBeingStored:
    """vllm#18246: the blocks of `a` are sent in 2 ms, and stored until 521 ms; `f` wants them at 61 ms.

    Here only Mooncake delays frees; what a tier still reads of a block is fenced: whoever gets it waits.
    """

    CLIENTS = workload(
        request("a", 0, prompt_tokens=32, text=TEXT),
        request("f", 60, prompt_tokens=60),
        request("b", 3000, prompt_tokens=36, text=TEXT),
    )
    GONE = "cache.reset:at=2900ms,what=gpu"

    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    def test_they_are_given_away_when_the_last_reader_is_through(self, behaviour: str) -> None:
        slow = "offload.store-slow:instance=P0,request=a,delay=500ms"
        played = play(both("mooncake,offloading"), self.CLIENTS, slow, self.GONE, behaviour=behaviour)
        assert not played.violations
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        (sent,) = played.of("send.finished", request_id="a")
        (stored,) = played.of("store.finished", instance="P0", request_id="a")
        (computed,) = played.of("request.first_token", instance="P0", request_id="f")
        assert sent.time_ns < 14 * 10**6
        assert 500 * 10**6 < stored.time_ns <= computed.time_ns
        # What was stored is right: it is served when the GPU has lost it.
        loads = played.of("load.started", instance="P0", request_id="b")
        assert [(event.num_tokens, event.status) for event in loads] == [(32, "CPU")]

    @pytest.mark.parametrize(("behaviour", "broken"), [("vllm-0.33", {"CONTENT"}), ("ideal", set())])
    def test_read_after_they_were_given_away_they_are_the_next_ones(self, behaviour: str, broken: set[str]) -> None:
        late = "offload.late-read:instance=P0,request=a,delay=500ms"
        played = play(both("mooncake,offloading"), self.CLIENTS, late, self.GONE, behaviour=behaviour, recompute=True)
        assert laws(played) == broken
        assert {event.request_id for event in played.violations} <= {"b"}


def test_what_an_engine_stored_is_in_its_tier() -> None:
    played = play(both("mooncake,offloading"), TestM1SentAndStillBeingStored.CLIENTS)
    for node in played.cluster.nodes:
        assert isinstance(node.offload, Offload)
        assert not (node.offload.cpu.chunks.ref_counts > 0).any()
