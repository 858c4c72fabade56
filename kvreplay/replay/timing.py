"""What a forward pass costs in virtual time: integers, linear in what the step does.

A step costs something fixed (kernel launches, collectives, reading the weights), something per prefill token
(arithmetic), per decoding request (its row in every matrix product, sampling) and per KV token read (memory
bandwidth). Attention arithmetic that grows with the square of the prompt is folded into the cost per prefill token,
at the prompt length that a preset names.
"""

from dataclasses import dataclass
from typing import Final

from kvreplay.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Costs of one forward pass. `name` says where they come from, for the report."""

    name: str = "custom"
    fixed_ns: int
    per_prefill_token_ps: int
    per_request_ns: int
    per_kv_token_ps: int

    def __post_init__(self) -> None:
        # A step that took no time would let a replay run for ever at one instant.
        if self.fixed_ns <= 0:
            raise ConfigError(f"timing.fixed_ns must be > 0, got {self.fixed_ns}")
        for name in ("per_prefill_token_ps", "per_request_ns", "per_kv_token_ps"):
            if getattr(self, name) < 0:
                raise ConfigError(f"timing.{name} must be >= 0, got {getattr(self, name)}")

    def step_ns(self, num_prefill_tokens: int, num_decodes: int, num_kv_tokens: int) -> int:
        """One step's duration. `num_kv_tokens`: positions that the decoding requests attend to, summed."""
        variable_ps = self.per_prefill_token_ps * num_prefill_tokens + self.per_kv_token_ps * num_kv_tokens
        return self.fixed_ns + self.per_request_ns * num_decodes + variable_ps // 1000

    def decode_run_ns(self, num_decodes: int, num_kv_tokens: int, num_steps: int) -> int:
        """What `num_steps` steps of nothing but `num_decodes` decoding requests take, one after another.

        The first reads `num_kv_tokens`, each later one `num_decodes` more. Exactly the sum of `step_ns`, rounding
        included, in logarithmic time.
        """
        constant_ns = self.fixed_ns + self.per_request_ns * num_decodes
        growth_ps = self.per_kv_token_ps * num_decodes
        return constant_ns * num_steps + _floor_sum(num_steps, 1000, growth_ps, self.per_kv_token_ps * num_kv_tokens)

    def num_decode_steps_within(self, num_decodes: int, num_kv_tokens: int, span_ns: int) -> int:
        """The largest number of steps for which `decode_run_ns` is at most `span_ns`."""
        # No step is shorter than the first, nor longer than the last of as many as could be.
        high = span_ns // self.step_ns(0, num_decodes, num_kv_tokens)
        low = span_ns // self.step_ns(0, num_decodes, num_kv_tokens + high * num_decodes)
        while low < high:
            middle = (low + high + 1) // 2
            if self.decode_run_ns(num_decodes, num_kv_tokens, middle) <= span_ns:
                low = middle
            else:
                high = middle - 1
        return low


def _floor_sum(num_terms: int, modulus: int, slope: int, offset: int) -> int:
    """Σ (slope·i + offset) // modulus for i in [0, num_terms), by the Euclidean algorithm on the lattice."""
    total = 0
    while num_terms:
        total += (num_terms - 1) * num_terms // 2 * (slope // modulus) + num_terms * (offset // modulus)
        slope, offset = slope % modulus, offset % modulus
        num_terms, offset = divmod(slope * num_terms + offset, modulus)
        modulus, slope = slope, modulus
    return total


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingPreset:
    timing: StepTiming
    source: str
    """Which public numbers it comes from, and how."""


_LLAMA_8B: Final = (
    "A roofline, not a measurement, of Llama 3.1 8B in BF16 with TP {gpus} on {gpus} x H100 SXM (data sheet: 989 "
    "TFLOP/s dense BF16, 3.35 TB/s HBM3 per GPU). Prefill: 2 x 8.03e9 FLOP per token, and 32 layers x 4 x 4,096 x "
    "16.4k / 2 for attention at the mean context of the public Mooncake conversation trace, 24.7 GFLOP, at 45 % of "
    "{flops} PFLOP/s is {prefill} us, {rate} tokens/s. Fixed: 16.1 GB of weights at 75 % of the HBM rate ({bandwidth} "
    "TB/s) is {weights} ms, and 3 ms for 64 all-reduces and launches, {fixed} ms. KV: 131,072 B per token at the same "
    "rate is {kv} ns. 20 us per decoding request for its share of the products and for sampling."
)


TIMING_PRESETS: Final[dict[str, TimingPreset]] = {
    "llama-70b-8xh100": TimingPreset(
        timing=StepTiming(
            name="llama-70b-8xh100",
            fixed_ns=10_000_000,
            per_prefill_token_ps=40_000_000,
            per_request_ns=20_000,
            per_kv_token_ps=16_300,
        ),
        source=(
            "A roofline, not a measurement, of Llama 3 70B in BF16 with TP 8 on one 8 x H100 SXM node (data sheet: 989 "
            "TFLOP/s dense BF16, 3.35 TB/s HBM3 per GPU). Prefill: 2 x 70.6e9 FLOP per token at 45 % of the node's 7.9 "
            "PFLOP/s is 39.7 us, 25,000 tokens/s. Fixed: 141 GB of weights at 75 % of 26.8 TB/s is 7.0 ms, and 3 ms "
            "for 160 all-reduces and launches. KV: 327,680 B per token at the same 20.1 TB/s is 16.3 ns. 20 us per "
            "decoding request for its share of the products and for sampling."
        ),
    ),
    "llama-8b-4xh100": TimingPreset(
        timing=StepTiming(
            name="llama-8b-4xh100",
            fixed_ns=4_600_000,
            per_prefill_token_ps=13_900_000,
            per_request_ns=20_000,
            per_kv_token_ps=13_000,
        ),
        source=_LLAMA_8B.format(
            gpus=4, flops="4.0", prefill="13.9", rate="72,000", weights="1.6", bandwidth="10.1", fixed="4.6", kv="13.0"
        ),
    ),
    "llama-8b-2xh100": TimingPreset(
        timing=StepTiming(
            name="llama-8b-2xh100",
            fixed_ns=6_200_000,
            per_prefill_token_ps=27_700_000,
            per_request_ns=20_000,
            per_kv_token_ps=26_000,
        ),
        source=_LLAMA_8B.format(
            gpus=2, flops="2.0", prefill="27.7", rate="36,000", weights="3.2", bandwidth="5.0", fixed="6.2", kv="26.0"
        ),
    ),
    "deepseek-v3-8xh800": TimingPreset(
        timing=StepTiming(
            name="deepseek-v3-8xh800",
            fixed_ns=20_000_000,
            per_prefill_token_ps=56_000_000,
            per_request_ns=22_000,
            per_kv_token_ps=3_300,
        ),
        source=(
            "DeepSeek, 'DeepSeek-V3/R1 Inference System Overview' (open-infra-index, 1 March 2025): per H800 node "
            "73.7k input tokens/s of which 56.3 % cache hits, hence 32.2k/s computed, and 14.8k output tokens/s at "
            "20-22 tokens/s per stream and 4,989 KV tokens per output token. Prefill: 37e9 active parameters are 74 "
            "GFLOP per token, MLA attention adds 5.0 MFLOP per token of context (61 layers x 128 heads x (192 + 128) "
            "x 2); 32.2k/s at a mean context of 2.5k gives 2.77 PFLOP/s; at a mean context of 16.4k (that of the "
            "public Mooncake conversation trace, a prompt token seeing half its prompt) a token costs 156 GFLOP, 56 "
            "us, 17,800 tokens/s. KV: 70,272 B per token at 80 % of 8 x 3.35 TB/s is 3.3 ns. Decode: 47 ms per token "
            "at about 700 streams per node, 11.5 ms of it KV; the rest is split into 20 ms fixed (an assumption: 40-50 "
            "tokens/s per stream on a lightly loaded node) and 22 us per stream. Expert parallelism over several "
            "nodes, as DeepSeek runs it, is counted as if each node stood alone."
        ),
    ),
}
