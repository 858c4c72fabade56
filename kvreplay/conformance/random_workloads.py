"""Random workloads: every kind of KV cache group, and most ways in which loads, aborts and pressure can meet.

The same seed and choices give the same workload, on every machine. They are small (a few requests, tight pools), so
that a difference between two engines can be read, and wild: a report may come twice, too late or for a stranger.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from random import Random
from typing import Any, Final, TypeAlias

from kvreplay.conformance.workload import sampled_token

Fields: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Layout:
    """KV cache groups and the engine settings that they need."""

    block_size: int
    groups: tuple[Mapping[str, Any], ...]
    settings: Mapping[str, Any]

    @property
    def block_sizes(self) -> list[int]:
        return [group.get("block_size", self.block_size) for group in self.groups]

    @property
    def types(self) -> set[str]:
        return {group["type"] for group in self.groups}

    @property
    def forgets(self) -> bool:
        """Whether some group drops what is behind its window, or its older states."""
        return bool(self.types & {"swa", "swa_mla", "mamba"})


def _layout(block_size: int, *groups: Mapping[str, Any], **settings: object) -> Layout:
    return Layout(block_size, groups, settings)


_FULL_8: Final = {"type": "full", "block_size": 8}
_ALIGNED_MAMBA: Final = {"type": "mamba", "block_size": 8, "mode": "align"}

LAYOUTS: Final[Mapping[str, Layout]] = {
    "full": _layout(4, {"type": "full"}),
    "swa": _layout(4, {"type": "swa", "sliding_window": 8}),
    "mla": _layout(4, {"type": "mla"}),
    "swa_mla": _layout(4, {"type": "swa_mla", "sliding_window": 8}),
    "chunked": _layout(4, {"type": "chunked_local", "chunk": 16}),
    "full_swa": _layout(4, {"type": "full"}, {"type": "swa", "sliding_window": 8}),
    "full_fine_swa": _layout(8, _FULL_8, {"type": "swa", "block_size": 4, "sliding_window": 8}),
    "full_coarse_swa": _layout(4, {"type": "full"}, {"type": "swa", "block_size": 16, "sliding_window": 20}),
    "full_swa_fine_hash": _layout(
        8, _FULL_8, {"type": "swa", "block_size": 8, "sliding_window": 13}, hash_block_size=4
    ),
    "full_two_swa": _layout(
        4, {"type": "full"}, {"type": "swa", "sliding_window": 8}, {"type": "swa", "sliding_window": 16}
    ),
    "full_chunked": _layout(4, {"type": "full"}, {"type": "chunked_local", "chunk": 16}),
    "full_swa_chunked": _layout(
        8,
        _FULL_8,
        {"type": "swa", "block_size": 8, "sliding_window": 16},
        {"type": "chunked_local", "block_size": 8, "chunk": 32},
    ),
    "mamba": _layout(8, _FULL_8, _ALIGNED_MAMBA, mamba_cache_mode="align"),
    "mamba_fine_hash": _layout(8, _FULL_8, _ALIGNED_MAMBA, mamba_cache_mode="align", hash_block_size=4),
    "mamba_swa": _layout(
        8, _FULL_8, {"type": "swa", "block_size": 8, "sliding_window": 16}, _ALIGNED_MAMBA, mamba_cache_mode="align"
    ),
    "mamba_plain": _layout(4, {"type": "full"}, {"type": "mamba", "block_size": 256}, enable_prefix_caching=False),
    "mla_replay": _layout(
        8,
        {"type": "mla", "block_size": 8},
        {"type": "swa_mla", "block_size": 8, "sliding_window": 16, "bounded_replay": True},
    ),
    "ring": _layout(
        8,
        {"type": "mla", "block_size": 8},
        {"type": "swa_mla", "block_size": 4, "sliding_window": 8},
        {"type": "ring", "block_size": 12},
    ),
    "five_groups": _layout(
        32,
        {"type": "mla", "block_size": 32, "tokens_per_state": 4},
        {"type": "mla", "block_size": 32, "tokens_per_state": 32},
        {"type": "swa_mla", "block_size": 32, "sliding_window": 32},
        {"type": "swa_mla", "block_size": 4, "sliding_window": 8},
        {"type": "swa_mla", "block_size": 8, "sliding_window": 16},
    ),
}

FEATURES: Final = ("async", "spec", "priority", "roles")
"""What is drawn in a part of the workloads, where it is asked for: async scheduling, speculative decoding, priority
scheduling, and the roles and rules of a connector that differ from the plainest one's."""

_DRAFTERS_WITH_KV: Final = ("eagle", "mtp")
_WINDOWS: Final = {1: (1, 2, 5), 2: (1, 3, 4, 9), 4: (2, 5, 6, 8, 13), 8: (4, 8, 13, 16), 16: (5, 20, 33), 32: (32,)}
_CHUNKS: Final = {1: (3, 4), 2: (4, 7), 4: (8, 10, 16), 8: (16, 32), 16: (24, 32)}


def random_workload(
    seed: int, *, layouts: Sequence[str] = tuple(LAYOUTS), features: Iterable[str] = FEATURES
) -> Fields:
    """A workload's JSON. Its layout is one of `layouts`; it may have any of `features`."""
    rng = Random(f"{seed} {' '.join(layouts)} {' '.join(features)}")
    name = rng.choice(list(layouts))
    layout = LAYOUTS[name]
    if len(layout.groups) == 1 and rng.random() < 0.4:
        layout = replace(layout, block_size=rng.choice([1, 2, 8, 16]))
    return _Draw(rng, layout, frozenset(features)).workload(f"seed{seed}_{name}")


class _Draw:
    """One workload in the making. Every method draws from the one generator, in a fixed order."""

    def __init__(self, rng: Random, layout: Layout, features: frozenset[str]) -> None:
        self.rng = rng
        self.layout = layout
        self.features = features
        self.is_hybrid = len(layout.groups) > 1
        self.unit = max(layout.block_sizes) if max(layout.block_sizes) <= 32 else layout.block_size
        self.engine: Fields = {}
        self.requests: list[Fields] = []
        # Most workloads leave most settings alone: a wild mixture in each would hide what a single one does.
        self.temper = rng.choice([0.3, 1.0, 1.0, 2.0, 4.0])
        self.families = [rng.randrange(1, 5000) for _ in range(3)]

    def workload(self, name: str) -> Fields:
        longest = self.rng.choice([12, 24, 24, 40]) * (2 if self.unit > 8 else 1) + self.unit
        self._draw_engine(longest)
        for index in range(self.rng.randrange(1, 14) if self.rng.random() < 0.9 else self.rng.randrange(14, 40)):
            self.requests.append(self._request(f"r{index}", longest))
        self.requests.sort(key=lambda request: int(request["arrive"]))
        self._draw_pool()
        events = sorted(self._events(), key=lambda event: int(event["step"]))
        return {"name": name, "engine": self.engine, "requests": self.requests, "events": events, "max_steps": 120}

    def _maybe(self, probability: float) -> bool:
        return self.rng.random() < min(probability * self.temper, 0.9)

    # -- the engine -------------------------------------------------------------------------------------------

    def _draw_engine(self, longest: int) -> None:
        rng, engine = self.rng, self.engine
        engine["block_size"] = self.layout.block_size
        engine.update(self.layout.settings)
        if self.layout.groups != ({"type": "full"},):
            engine["groups"] = [self._group(group) for group in self.layout.groups]
        budget = rng.choice([8, 16, 24, 32, 64]) + (self.unit if self.unit > 8 else 0)
        engine["max_num_batched_tokens"] = budget
        engine["max_num_seqs"] = rng.choice([1, 2, 4, 8, 8])
        engine["max_model_len"] = longest + rng.choice([4, 10]) if self._maybe(0.08) else 256
        if self._maybe(0.3):
            engine["kv_load_failure_policy"] = "fail"
        if self._maybe(0.05):
            engine["connector"] = True
        if self._maybe(0.2) and "enable_prefix_caching" not in engine and "mamba_cache_mode" not in engine:
            engine["enable_prefix_caching"] = False
        if self._maybe(0.2):
            engine["scheduler_reserve_full_isl"] = False
        if self._maybe(0.1):
            engine["long_prefill_token_threshold"] = rng.choice([3, 4, 8, 16])
            engine["long_prefill_token_threshold_adaptive"] = rng.random() < 0.4
        if self._maybe(0.1):
            engine["watermark"] = rng.choice([0.02, 0.1, 0.3])
        if self._maybe(0.1):
            engine["prefill_schedule_interval"] = rng.randrange(2, 5)
        if self._maybe(0.1):
            engine["max_num_scheduled_tokens"] = rng.randrange(budget // 2, budget + 1)
        if self._maybe(0.1):
            engine["max_num_active_seqs"] = rng.randrange(1, engine["max_num_seqs"] + 1)
        if self._maybe(0.08):
            engine["enable_chunked_prefill"] = False
            engine["max_num_batched_tokens"] = engine["max_model_len"] = longest + 16
        if self._maybe(0.3) and self.layout.forgets and engine.get("enable_prefix_caching", True):
            engine["retention_interval"] = rng.choice([0, 0, 1, 4]) * lcm(*self.layout.block_sizes)
        self._draw_features()

    def _draw_features(self) -> None:
        rng, engine = self.rng, self.engine
        if "async" in self.features and rng.random() < 0.3:
            engine["async_scheduling"] = True
            if self._maybe(0.2):
                engine["hisparse_host_blocks"] = 8
        if "priority" in self.features and rng.random() < 0.25:
            engine["policy"] = "priority"
        if "roles" in self.features:
            if self._maybe(0.3):
                engine["kv_role"] = rng.choice(["kv_producer", "kv_consumer"])
            if self._maybe(0.15):
                engine["requires_kv_delivery"] = True
            if self._maybe(0.3) and engine.get("mamba_cache_mode") == "align":
                engine["divergent_hits"] = True
        if "spec" in self.features and rng.random() < 0.3:
            self._draw_speculation()

    def _draw_speculation(self) -> None:
        rng, engine = self.rng, self.engine
        num_tokens = rng.randrange(1, 4)
        method = rng.choice(["eagle", "eagle", "mtp", "draft_model", "ngram"])
        if "chunked_local" in self.layout.types and method in _DRAFTERS_WITH_KV:
            method = "draft_model"  # vLLM refuses the others
        spec: Fields = {"method": method, "tokens": num_tokens}
        if rng.random() < 0.8:
            spec["accept"] = [rng.randrange(0, num_tokens + 1) for _ in range(rng.randrange(1, 5))]
        if method == "mtp" and rng.random() < 0.5:
            spec["mtp_layers"] = num_tokens
        if self._maybe(0.3):
            spec["disable_block_drop"] = True
        if self._maybe(0.4):
            spec["disable_lookahead_hashes"] = True
        engine["spec"] = spec
        groups = engine.get("groups", [])
        for group in groups:
            if group["type"] == "mamba" and group.get("mode") == "align":
                group["spec_blocks"] = num_tokens
        if groups and method in _DRAFTERS_WITH_KV and rng.random() < 0.4:
            rng.choice([group for group in groups if group["type"] != "mamba"])["eagle"] = True

    def _group(self, group: Mapping[str, Any]) -> Fields:
        drawn = dict(group)
        block_size = group.get("block_size", self.layout.block_size)
        if "sliding_window" in group and "bounded_replay" not in group:
            drawn["sliding_window"] = self.rng.choice(_WINDOWS[block_size])
        if "chunk" in group:
            drawn["chunk"] = self.rng.choice(_CHUNKS[block_size])
        if group["type"] in ("swa", "swa_mla") and self._maybe(0.05):
            drawn["extra_retained"] = self.rng.randrange(1, 4)
        return drawn

    def _draw_pool(self) -> None:
        """Mostly a few times what the largest request needs, so that blocks are short; seldom too small for it."""
        longest = max(request["tokens"] + request["max_tokens"] for request in self.requests)
        lookahead = self.engine["spec"]["tokens"] + 1 if "spec" in self.engine else 0
        need = sum(-(-(longest + lookahead) // size) + 1 for size in self.layout.block_sizes)
        share = self.rng.choice([0.9, 1.0, 1.2, 1.2, 1.5, 2.0, 3.0])
        self.engine["num_gpu_blocks"] = max(2, 1 + round(need * share) + self.rng.randrange(3))
        for request in self.requests:
            del request["tokens"]

    # -- requests ---------------------------------------------------------------------------------------------

    def _request(self, request_id: str, longest: int) -> Fields:
        rng = self.rng
        parts, length = self._prompt(longest)
        if length >= self.engine["max_model_len"]:  # a frontend lets none pass
            parts, length = [{"ramp": [rng.randrange(6000, 20000), longest]}], longest
        request: Fields = {
            "id": request_id,
            "prompt": parts[0] if len(parts) == 1 else {"cat": parts},
            "max_tokens": rng.choice([1, 2, 4, 8, 12, 16]),
            "arrive": rng.choice([0, 0, rng.randrange(0, 6), rng.randrange(0, 24)]),
            "tokens": length,
        }
        if self._maybe(0.08):
            position = length + rng.randrange(0, request["max_tokens"])
            request["stop"] = [sampled_token(position)]
        if self._maybe(0.05):
            request["salt"] = rng.choice(["x", "y"])
        if self.engine.get("policy") == "priority":
            request["priority"] = rng.randrange(0, 4)
        if rng.random() < min(0.5, 0.5 * self.temper):
            self._draw_external(request, length)
        if self._maybe(0.12):
            request["delay_free"] = rng.choice([True, True, "always"])
            if rng.random() < 0.9:
                request["send_after"] = rng.randrange(0, 7)
        if "spec" in self.engine and self._maybe(0.2):
            request["accept"] = [rng.randrange(0, self.engine["spec"]["tokens"] + 1)]
        return request

    def _prompt(self, longest: int) -> tuple[list[Fields | list[int]], int]:
        """Parts and length. Many share the start of a family, or go on where another request's output ended."""
        rng = self.rng
        length = rng.randrange(1, longest + 1)
        if rng.random() < 0.1:
            length = max(self.unit, length // self.unit * self.unit)
        if self.requests and self._maybe(0.12):
            return self._later_turn(longest)
        shared = rng.randrange(0, length + 1) if rng.random() < 0.7 else 0
        start: Fields = {"ramp": [rng.choice(self.families), shared]}
        if self._maybe(0.05):
            start = {"const": [7, shared]}
        rest: Fields = {"ramp": [rng.randrange(6000, 20000), length - shared]}
        parts = [part for part, tokens in ((start, shared), (rest, length - shared)) if tokens]
        return list(parts), length

    def _later_turn(self, longest: int) -> tuple[list[Fields | list[int]], int]:
        """An earlier request's prompt, the start of its output, and something new."""
        rng = self.rng
        earlier = rng.choice(self.requests)
        start, num_output = earlier["tokens"], rng.randrange(0, min(earlier["max_tokens"], 20) + 1)
        output = [sampled_token(position) for position in range(start, start + num_output)]
        num_new = rng.randrange(1, max(2, longest // 3))
        parts: list[Fields | list[int]] = [earlier["prompt"]]
        if output:
            parts.append(output)
        parts.append({"ramp": [rng.randrange(20000, 29000), num_new]})
        return parts, start + num_output + num_new

    # -- loads ------------------------------------------------------------------------------------------------

    def _draw_external(self, request: Fields, length: int) -> None:
        rng = self.rng
        is_async = rng.random() < 0.6
        tokens = length if is_async and rng.random() < 0.3 else rng.randrange(0, length)
        if rng.random() < 0.8:
            tokens -= tokens % self.unit
        if not tokens:
            return
        external: Fields = {"tokens": tokens}
        if is_async:
            external["async"] = True
        if rng.random() < 0.3:
            external["times"] = rng.randrange(1, 3)
        if self._maybe(0.15):
            external["defer"] = rng.randrange(1, 4)
        if self._maybe(0.04):
            external["mode"] = "extra"
        request["external"] = tokens if not is_async and len(external) == 1 else external
        load = self._load(tokens, is_async=is_async)
        if load:
            request["load"] = load

    def _load(self, tokens: int, *, is_async: bool) -> Fields:
        rng = self.rng
        load: Fields = {}
        recv_after = rng.choice([0, 1, 1, 2, 3, 5])
        if is_async and not self._maybe(0.03):
            load["recv_after"] = recv_after
        # A report by block kills an engine that has several groups; one by request needs an asynchronous load.
        if self._maybe(0.4 if not self.is_hybrid else 0.02):
            num_blocks = max(1, tokens // self.layout.block_size)
            load["invalid"] = [
                [rng.randrange(len(self.layout.groups)), rng.randrange(num_blocks + (rng.random() < 0.1))]
                for _ in range(rng.randrange(1, 3))
            ]
            if is_async and rng.random() < 0.8:
                load["invalid_after"] = rng.randrange(0, recv_after + 1)
            elif self._maybe(0.3):
                load["invalid_after"] = rng.randrange(0, 4)
        elif is_async and self._maybe(0.3):
            load["failed_after"] = rng.randrange(0, recv_after + 1)
        if load and self._maybe(0.15):
            load["repeat"] = True
        return load

    # -- events -----------------------------------------------------------------------------------------------

    def _events(self) -> list[Fields]:
        rng = self.rng
        last = max(request["arrive"] for request in self.requests) + 12
        events: list[Fields] = []
        if self.temper > 2 and rng.random() < 0.5:
            return [self._wild_event(last) for _ in range(rng.randrange(2, 9))]

        def some_id() -> str:
            return str(rng.choice(self.requests)["id"])

        num_aborts = rng.choice([0, 0, 1, 1, 2, 3])
        kinds = ("abort", "abort", "abort_mid")
        events += [{"step": rng.randrange(0, last), rng.choice(kinds): [some_id()]} for _ in range(num_aborts)]
        if self._maybe(0.08):
            event: Fields = {"step": rng.randrange(1, last), "reset_prefix_cache": True}
            if rng.random() < 0.4:
                event["reset_running"] = True
            events.append(event)
        if self._maybe(0.08) and not self.is_hybrid:
            events.append({"step": rng.randrange(1, last), "invalid_ids": [self._some_block(), self._some_block()]})
        if self._maybe(0.08) and not self.is_hybrid:
            events.append({"step": rng.randrange(1, last), "invalid": [[some_id(), 0, rng.randrange(0, 6)]]})
        if self._maybe(0.08):
            events.append({"step": rng.randrange(1, last), "failed_recving": [some_id()]})
        if self._maybe(0.03):
            report = rng.choice(["finished_recving", "finished_sending"])
            events.append({"step": rng.randrange(1, last), report: [some_id()]})
        return events

    def _wild_event(self, last: int) -> Fields:
        """A report that fits nothing that has happened, as often as not."""
        rng = self.rng
        ids = [str(rng.choice(self.requests)["id"]) for _ in range(rng.randrange(1, 3))]
        kind = rng.choice(["abort", "abort_mid", "failed_recving", "reset_prefix_cache", "invalid", "invalid_ids"])
        if self.is_hybrid and kind.startswith("invalid"):
            kind = "failed_recving"
        values: Fields = {
            "reset_prefix_cache": True,
            "invalid": [[ids[0], 0, rng.randrange(0, 8)]],
            "invalid_ids": [self._some_block() for _ in range(rng.randrange(1, 4))],
        }
        return {"step": rng.randrange(0, last), kind: values.get(kind, ids)}

    def _some_block(self) -> int:
        return self.rng.randrange(int(self.engine["num_gpu_blocks"]))
