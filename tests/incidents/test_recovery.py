"""Public incidents of loads that fail, as whole runs: who is harmed, and what it costs."""

from pathlib import Path

import pytest

from kvreplay.replay.config import Policy
from tests.incidents.test_speculation import sized
from tests.scenarios.offload_stage import offloading
from tests.scenarios.stage import Play, judge, pair, play, request, workload


@pytest.mark.incident("G4")
class TestG4AHandshakeThatFails:
    """vllm#33745, vllm#40364: two requests are running, a third is pulled from a producer that does not fit.

    Mooncake has no handshake: the producer refuses at the pull, for the number of groups or with another error.
    """

    CLIENTS = workload(
        request("r1", 0, prompt_tokens=16, output_tokens=20),
        request("r2", 0, prompt_tokens=16, output_tokens=20),
        request("r3", 60, prompt_tokens=16),
    )
    MISFITS = ("mooncake.group-mismatch", "error-response")

    def play(self, misfit: str, behaviour: str, *, recompute: bool = False) -> Play:
        return play(pair(), self.CLIENTS, f"{misfit}:request=r3", behaviour=behaviour, recompute=recompute)

    @pytest.mark.parametrize("misfit", MISFITS)
    @pytest.mark.parametrize("behaviour", ["vllm-0.33", "ideal"])
    @pytest.mark.parametrize("recompute", [False, True])
    def test_only_the_third_fails_or_is_computed(self, misfit: str, behaviour: str, *, recompute: bool) -> None:
        played = self.play(misfit, behaviour, recompute=recompute)
        ends = played.ends()
        assert not played.violations
        # Each of the others takes 20 steps of 10 ms from the pull's end on, with the third and without.
        assert ends == {**play(pair(), self.CLIENTS).ends(), "r3": ends["r3"]}
        assert ends["r3"][0] == ("finished" if recompute else "failed")
        recomputed = [event.num_tokens for event in played.of("tokens.recomputed", request_id="r3")]
        assert recomputed == ([16] if recompute else [])

    @pytest.mark.parametrize("misfit", MISFITS)
    def test_taken_for_a_success_wrong_contents_are_decoded_on(self, misfit: str) -> None:
        """As in the version of the incident, which did not hear of the failure where it looked for the end."""
        played = self.play(misfit, "vllm-0.33 mooncake_failure=received")
        assert {(event.status, event.request_id) for event in played.violations} == {("CONTENT", "r3")}
        assert played.ends()["r3"][0] == "finished"


@pytest.mark.incident("G6")
class TestG6FoundAndGoneWhenItIsWanted:
    """vllm-ascend#15060: 2 of the 4 blocks that a lookup has found are evicted before they are loaded.

    Blocks of 16 tokens; the two are half of the prompt's 64. A tier's load is one job: where a part of it is gone, all
    of it is computed again, 64 tokens instead of the record's 32.
    """

    def judge(self, folder: Path, behaviour: str, policy: Policy) -> tuple[str, int, int, list[str]]:
        """Outcome of `b`, tokens computed again, requests failed, and what killed an engine."""
        config = sized(offloading(), num_gpu_blocks=40, max_model_len=100)
        text = "abcdefghijklmnopqrst"
        clients = workload(request("a", 0, prompt_tokens=64, text=text), request("b", 400, prompt_tokens=80, text=text))
        faults = ("cache.reset:at=300ms,what=gpu", "offload.evict-between:request=b")
        summary = judge(folder, config, clients, *faults, behaviour=behaviour, policy=policy)
        again = summary.recomputed_tokens.by_cause.get("load-failure", 0)
        return summary.verdict, again, summary.requests.failed, [crash.message for crash in summary.crashes]

    @pytest.mark.parametrize("policy", ["fail", "recompute"])
    def test_in_0_33_the_engine_dies(self, tmp_path: Path, policy: Policy) -> None:
        assert self.judge(tmp_path, "vllm-0.33", policy) == ("crashed", 0, 1, ["chunk not found in cache"])

    @pytest.mark.parametrize(("policy", "again", "failed"), [("recompute", 64, 0), ("fail", 0, 1)])
    def test_ideally_it_is_a_miss(self, tmp_path: Path, policy: Policy, again: int, failed: int) -> None:
        assert self.judge(tmp_path, "ideal", policy) == ("passed", again, failed, [])
