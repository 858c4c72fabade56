"""Random command lines: a workload, a cluster, faults and switches, all drawn from one number."""

import io
import json
import random
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

from kvreplay.cli.app import run_app

MAX_MODEL_LEN: Final = 2048
_MODELS: Final = {
    "full": ("kind='full',bytes_per_token=64",),
    "mla": ("kind='mla',bytes_per_token=64",),
    "window": ("kind='full',bytes_per_token=64", "kind='sliding_window',bytes_per_token=64,sliding_window=96"),
    "windows": (
        "kind='full',bytes_per_token=64",
        "kind='sliding_window',bytes_per_token=64,sliding_window=96",
        "kind='sliding_window',bytes_per_token=64,sliding_window=96",
        "kind='sliding_window',bytes_per_token=64,sliding_window=256",
    ),
    "states": (
        "kind='full',bytes_per_token=64,block_size=32",
        "kind='mamba',state_bytes=2048,block_size=32,mamba_cache_mode='align'",
        "kind='mamba',state_bytes=2048,block_size=32,mamba_cache_mode='align'",
    ),
    "latents-and-states": (
        "kind='mla',bytes_per_token=64,block_size=32",
        "kind='mamba',state_bytes=2048,block_size=32,mamba_cache_mode='align'",
    ),
    "chunks": (
        "kind='full',bytes_per_token=64",
        "kind='chunked_local',bytes_per_token=64,attention_chunk_size=128",
        "kind='chunked_local',bytes_per_token=64,attention_chunk_size=128",
    ),
    "unequal-blocks": (
        "kind='full',bytes_per_token=32,block_size=32",
        "kind='sliding_window',bytes_per_token=64,block_size=16,sliding_window=96",
    ),
    "latent-windows": (
        "kind='mla',bytes_per_token=64",
        "kind='sliding_window_mla',bytes_per_token=64,sliding_window=64",
    ),
}
_PRESETS: Final = ("deepseek-v4-five-groups", "kimi-linear", "gemma-hybrid")
_BLOCK_BYTES: Final = 2048
"""Of the widest page above."""
_SETUP_FAULTS: Final = ("config.override", "mooncake.engine-init", "mooncake.register-mem")


@dataclass(frozen=True, slots=True)
class Case:
    """`workload`: options of `synth`. `blocks`: of a pool, beyond what a request of the longest kind needs."""

    workload: tuple[str, ...]
    config: str
    blocks: int
    options: tuple[str, ...]
    faults: tuple[str, ...]
    is_ideal: bool

    @property
    def arguments(self) -> list[str]:
        return [*self.options, *(word for fault in self.faults for word in ("--inject", fault))]


KINDS: Final = ("none", "offloading", "simple_cpu", "mooncake", "multi")


class Wish(NamedTuple):
    """What all cases are to have, whatever is drawn."""

    kind: str | None = None
    profile: str | None = None
    faults: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()


def draw(seed: int, wish: Wish = Wish()) -> Case:  # noqa: B008 - a constant
    rng = random.Random(seed)
    kind = rng.choice(("none", "offloading", "offloading", "simple_cpu", "mooncake", "mooncake", "multi"))
    kind = wish.kind or kind
    others = list(_known("profiles")["profiles"])
    profile = rng.choices((None, "ideal", *others), (4, 6, *[0.2] * len(others)))[0]
    profile = wish.profile or profile
    faults = [_fault(rng, kind) for _ in range(rng.choice((0, 0, 1, 1, 2, 3)))]
    options = ["--seed", str(rng.randrange(1000))]
    if profile is not None:
        options += ["--profile", profile]
    elif rng.random() < 0.4:
        for _ in range(rng.choice((1, 1, 3))):
            name, switch = rng.choice(list(_known("profiles")["switches"].items()))
            options += ["--behaviour", f"{name}={rng.choice(list(switch['values']))}"]
    if profile != "ideal" and rng.random() < 0.4:
        options += ["--policy", rng.choice(("fail", "recompute"))]
    options += [word for switch in wish.switches for word in ("--behaviour", switch)]
    config = _config(rng, kind)
    return Case(
        workload=tuple(_workload(rng)),
        config=config,
        blocks=rng.choice((0, 3, 40, 400)),
        options=tuple(options),
        faults=(*wish.faults, *(fault for fault in faults if fault is not None)),
        # Whose policy is to fail loses requests to timeouts shorter than its queue, which no fault names.
        is_ideal=profile == "ideal" and 'policy = "fail"' not in config,
    )


def _workload(rng: random.Random) -> list[str]:
    options: dict[str, object] = {
        "seed": rng.randrange(1000),
        "requests": rng.randint(3, 60),
        "arrivals": rng.choice(("constant", "poisson", "bursty")),
        "rate": rng.choice((0.3, 2, 20)),
        "prompt": f"lognormal:median={rng.choice((40, 200, 700))},sigma={rng.choice((0.3, 1.0))}",
        "output": f"lognormal:median={rng.choice((3, 40, 150))},sigma=0.7",
        "max-tokens": MAX_MODEL_LEN - 1,
        "hash-tokens": rng.choice((16, 64)),
        "abort": rng.choice((0, 0, 0, 0.1)),
    }
    if rng.random() < 0.6:
        options |= {"system-prompts": rng.choice((1, 3)), "system-tokens": rng.choice((64, 300))}
    if rng.random() < 0.5:
        options |= {"turns": 3, "think": rng.choice((1, 10))}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def _model(rng: random.Random) -> tuple[list[str], int]:
    """A model, and a multiple of what its widest block takes, in bytes."""
    lines = ["[model]", f"max_model_len = {MAX_MODEL_LEN}"]
    if rng.random() < 0.1:
        return [*lines, f'preset = "{rng.choice(_PRESETS)}"'], 1 << 22
    groups = _MODELS[rng.choice(list(_MODELS))]
    if "mla" in groups[0]:
        lines.append("use_mla = true")
    elif rng.random() < 0.3:
        lines.append(f"num_kv_heads = {rng.choice((1, 2, 8))}")
    for group in groups:
        lines += ["[[model.groups]]", *group.replace("=", " = ").split(",")]
    return lines, _BLOCK_BYTES * 4


def _config(rng: random.Random, kind: str) -> str:
    lines, block_bytes = _model(rng)
    lines += ["[timing]", 'preset = "llama-70b-8xh100"', "[topology]"]
    if kind in ("mooncake", "multi"):
        lines += [f"prefill = {rng.randint(1, 2)}", f"decode = {rng.randint(1, 2)}"]
    else:
        lines += [f"instances = {rng.randint(1, 2)}"]
    if kind != "none":
        lines += [f"tp = {rng.choice((1, 1, 2))}", f"pp = {rng.choice((1, 1, 1, 2))}"]
    if kind in ("mooncake", "multi") and rng.random() < 0.2:
        lines += [f"prefill_tp = {rng.choice((1, 2, 4))}", f"decode_tp = {rng.choice((1, 2, 4))}"]
    if rng.random() < 0.3:
        lines.append('proxy_decode = "least_loaded"')
    lines += ["[connector]", f'kind = "{kind}"', *_connector(rng, kind, block_bytes)]
    if kind in ("mooncake", "multi") and rng.random() < 0.4:
        lines += ["[network]", f"latency_ns = {rng.choice((10_000, 50_000_000, 2_000_000_000))}"]
        lines.append(f"bandwidth_bytes_per_s = {rng.choice((200_000, 50_000_000_000))}")
    budget = rng.choice((128, 512, 4096))
    lines += [
        "[scheduler]",
        f"max_num_batched_tokens = {budget}",
        f"max_num_seqs = {min(rng.choice((3, 16, 128)), budget)}",
        f"async_scheduling = {_word(rng.random() < 0.2)}",
        f'policy = "{rng.choice(("fcfs", "fcfs", "priority"))}"',
        f"long_prefill_token_threshold = {rng.choice((0, 0, 64))}",
        *_rare_scheduling(rng),
        "[cache]",
        f"enable_prefix_caching = {_word(rng.random() < 0.9)}",
        *([f"prefix_cache_retention_interval = {rng.choice((0, 64, 256))}"] if rng.random() < 0.2 else []),
    ]
    speculation = _speculation(rng) if rng.random() < (0.3 if kind in ("none", "offloading") else 0.15) else []
    check = rng.choice(("on", "on", "every-read"))
    return "\n".join([*lines, "num_gpu_blocks = {blocks}", *speculation, "[kv]", f'check = "{check}"', ""])


def _rare_scheduling(rng: random.Random) -> list[str]:
    lines = {
        "max_num_active_seqs": rng.choice((2, 5)),
        "scheduler_reserve_full_isl": "false",
        "watermark": rng.choice((0.01, 0.1)),
        "prefill_schedule_interval": rng.choice((2, 4)),
        "long_prefill_token_threshold_adaptive": "true",
        "max_num_scheduled_tokens": 128,
    }
    return [f"{name} = {value}" for name, value in lines.items() if rng.random() < 0.06]


def _connector(rng: random.Random, kind: str, block_bytes: int) -> list[str]:
    lines = []
    if kind in ("offloading", "multi", "simple_cpu"):
        lines.append(f"cpu_bytes_to_use = {block_bytes * rng.choice((20, 100, 2000))}")
    if kind == "simple_cpu":
        lines.append(f"lazy_offload = {_word(rng.random() < 0.5)}")
        lines.append(f"copy_bytes_per_s = {rng.choice((10_000_000, 40_000_000_000))}")
        if rng.random() < 0.3:
            lines += ['kv_offload_backend = "disk"', "use_page_cache = true", f"disk_bytes_per_s = {10**9}"]
            lines.append(f"disk_capacity_bytes = {block_bytes * rng.choice((20, 100, 2000))}")
    if kind in ("offloading", "multi"):
        lines.append(f"blocks_per_chunk = {rng.choice((1, 1, 2))}")
        spec_name = rng.choice(("CPUOffloadingSpec", "CPUOffloadingSpec", "TieringOffloadingSpec"))
        lines.append(f'spec_name = "{spec_name}"')
        lines.append(f'eviction_policy = "{rng.choice(("lru", "lru", "arc"))}"')
        lines.append(f"offload_prompt_only = {_word(rng.random() < 0.6)}")
        lines.append(f"sync_load_budget_bytes = {rng.choice((0, 0, 1 << 16))}")
        # Slow copies and links overlap with more.
        lines.append(f"load_bytes_per_s = {rng.choice((10_000_000, 40_000_000_000))}")
        lines.append(f"store_bytes_per_s = {rng.choice((10_000_000, 40_000_000_000))}")
        if spec_name == "TieringOffloadingSpec":
            lines.append(f"tier_bytes = {block_bytes * rng.choice((50, 1000))}")
            if rng.random() < 0.3:
                lines += [f"tier_latency = {rng.choice((0.00001, 0.5))}", "tier_bytes_per_s = 100_000_000"]
        elif rng.random() < 0.2:
            lines += ["store_threshold = 2", f"max_tracker_size = {rng.choice((50, 64_000))}"]
        if rng.random() < 0.15:
            lines.append(f"copy_latency = {rng.choice((0.0, 0.05))}")
    if kind in ("mooncake", "multi"):
        lines.append(f"abort_request_timeout = {rng.choice((480, 480, 20, 3))}")
        lines.append(f"num_workers = {rng.choice((10, 10, 1))}")
        if rng.random() < 0.15:
            name = rng.choice(("connector_timeout", "receive_timeout", "transfer_timeout"))
            lines.append(f"{name} = {rng.choice((0.05, 3.0))}")
        policy = rng.choice((None, None, "fail", "recompute"))
        lines += [] if policy is None else [f'kv_load_failure_policy = "{policy}"']
    if kind == "multi":
        lines.append(f'connectors = "{rng.choice(("mooncake,offloading", "offloading,mooncake"))}"')
    return lines


def _speculation(rng: random.Random) -> list[str]:
    return [
        "[speculative]",
        f'method = "{rng.choice(("eagle", "mtp", "ngram", "draft_model"))}"',
        f"num_speculative_tokens = {rng.randint(1, 4)}",
    ]


def _fault(rng: random.Random, kind: str) -> str | None:
    parts = {"multi": ("mooncake", "offloading")}.get(kind, (kind,))
    known = [
        fault
        for fault in _known("faults")["faults"]
        if fault["needs"] in (None, *parts) and fault["name"] not in _SETUP_FAULTS
    ]
    fault = rng.choice(known)
    words = []
    settings = fault["settings"]
    if "at" in settings:
        if settings["at"]["default"] == "1m":
            words.append(f"at={rng.choice((1, 5, 20))}s")
        if "down" in settings and rng.random() < 0.7:
            words.append(f"down={rng.choice((1, 30))}s")
    elif "p" in fault["keys"]:
        words.append(rng.choice(("p=0.05", "p=0.3", "p=1", f"nth={rng.randint(1, 4)}")))
    for name, setting in settings.items():
        if name == "when" and "mooncake" not in parts:
            words.append(f"when={rng.choice(('queued', 'running'))}")
        elif setting["choices"] and rng.random() < 0.6:
            words.append(f"{name}={rng.choice(setting['choices'])}")
        elif name == "delay" and rng.random() < 0.6:
            words.append(f"delay={rng.choice(('1ms', '300ms', '40s'))}")
    return ":".join(filter(None, (fault["name"], ",".join(words))))


@cache
def _known(command: str) -> dict[str, Any]:
    out = io.StringIO()
    with redirect_stdout(out):
        run_app([command, "--json"])
    known: dict[str, Any] = json.loads(out.getvalue())
    return known


def _word(value: bool) -> str:
    return str(value).lower()
