"""Faults of an engine and its set-up that need no connector."""

from dataclasses import replace

import pytest

from kvreplay.errors import ConfigError
from tests.scenarios.stage import Play, pair, play, request, role, single, workload

TWICE = workload(request("a", prompt_tokens=9, text="xyz"), request("b", 200, prompt_tokens=9, text="xyz"))
"""Blocks of 4: b hits two of a's."""


def recomputed(played: Play) -> list[tuple[str | None, int | None, str | None]]:
    return [(event.request_id, event.num_tokens, event.cause) for event in played.of("tokens.recomputed")]


class TestEvictions:
    def test_what_was_evicted_is_computed_again(self) -> None:
        assert play(single(), TWICE).of("tokens.recomputed") == []
        played = play(single(), TWICE, "cache.evict:at=100ms,blocks=9")
        evicted = [(event.time_ns, event.num_blocks, event.cause) for event in played.of("block.evicted")]
        assert evicted == [(100_000_000, 2, "injected")]
        assert recomputed(played) == [("b", 8, "eviction")]
        assert {kind for kind, _, _ in played.ends().values()} == {"finished"}
        assert played.violations == []

    def test_the_oldest_go_first(self) -> None:
        """a's blocks were given back tail first."""
        played = play(single(), TWICE, "cache.evict:at=100ms,blocks=1")
        assert recomputed(played) == [("b", 4, "eviction")]

    def test_blocks_in_use_stay(self) -> None:
        """a runs until 151 and holds all there is to evict."""
        long = workload(request("a", text="xy", output_tokens=15))
        played = play(single(), long, "cache.evict:at=100ms,blocks=9")
        assert played.of("block.evicted") == []
        assert played.ends() == {"a": ("finished", "E0", 151)}


class TestOverrides:
    def test_one_instance_may_have_a_pool_of_its_own(self) -> None:
        config = pair()
        played = play(config, TWICE, "config.override:instance=D0,key=cache.num_gpu_blocks,value=17")
        pools = {node.name: node.instance.scheduler.pool.num_blocks for node in played.cluster.nodes}
        assert pools == {"P0": 33, "D0": 17}
        assert [(event.status, event.time_ns) for event in played.of("fault.injected")] == [("config.override", 0)]

    def test_the_one_that_is_wrong_is_blamed(self) -> None:
        wrong = "config.override:key=decode.cache.num_gpu_blocks,value=2"
        fine = "config.override:key=scheduler.max_num_seqs,value=16"
        for faults in ((wrong, fine), (fine, wrong)):
            with pytest.raises(ConfigError, match=rf"^--inject {wrong}: "):
                play(pair(), TWICE, *faults)

    def test_or_all_of_a_role_or_all(self) -> None:
        spec = "config.override:key={},value=20"
        for key, expected in (("decode.cache.num_gpu_blocks", [33, 20]), ("cache.num_gpu_blocks", [20, 20])):
            played = play(pair(), TWICE, spec.format(key))
            assert [node.instance.scheduler.pool.num_blocks for node in played.cluster.nodes] == expected

    def test_a_consumer_that_is_less_patient_than_its_peers_expect(self) -> None:
        """Of two requests only D1's gives up early, whose receive timeout is another."""
        config = pair()
        config = replace(config, topology=replace(config.topology, decode=2))
        both = workload(request("a"), request("b"))
        override = "config.override:instance=D1,key=connector.receive_timeout,value=1.0"
        played = play(config, both, "timeout", override)
        ends = played.ends()
        assert [ends[name][:2] for name in ("a", "b")] == [("failed", "D0"), ("failed", "D1")]
        assert ends["b"][2] < 2_000 < 500_000 < ends["a"][2]

    @pytest.mark.parametrize(
        ("spec", "message"),
        [
            ("config.override:key=cache.num_gpu_block", "unknown key; did you mean 'cache.num_gpu_blocks'?"),
            ("config.override:value=many", "expected an integer"),
            (
                "config.override:instance=D0,key=model.block_size,value=8",
                "model.block_size is not for a single instance",
            ),
            ("config.override:value=1", "cache.num_gpu_blocks"),
        ],
    )
    def test_a_wrong_key_or_value_names_the_fault(self, spec: str, message: str) -> None:
        with pytest.raises(ConfigError) as error:
            play(pair(decode=role()), TWICE, spec)
        assert str(error.value).startswith(f"--inject {spec}: ")
        assert message in str(error.value)
