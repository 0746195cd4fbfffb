"""How fast a decoder can be on a machine: bytes and operations of a step against its limits.

Counted are matrices and attention, as the configuration gives them; norms, embeddings' rows, RoPE
and sampling are left out, so a limit is one that nobody can beat, not one that somebody reaches.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentbench_kv.engines.serving.model_facts import decoder_config, read_model
from agentbench_kv.errors import UsageError
from agentbench_kv.serving_bench.hardware import Hardware

IMPOSSIBLE = (
    "above 100 % is a fault of the measurement, no speed: the times, the sessions in a step, the "
    "dtypes or the machine's figures are wrong"
)
# Bytes of a number in weights or cache; scales of quantised ones are not counted.
BYTES = {"float32": 4.0, "float16": 2.0, "bfloat16": 2.0, "float8": 1.0, "int8": 1.0, "int4": 0.5}
# Model types whose feed-forward has two matrices; the others' have a gate besides.
_UNGATED = (
    *("apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_neox", "gptj", "mpt", "nemotron", "opt"),
    *("persimmon", "phi", "starcoder2"),
)
# Where configurations name what a mixture has, the first that is there counts.
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CHOSEN = ("num_experts_per_tok", "experts_per_token", "moe_k", "moe_topk")
_EXPERT_WIDTH = ("moe_intermediate_size", "intermediate_size")
_SHARED_WIDTH = ("shared_expert_intermediate_size", "shared_intermediate_size")
_SHARED = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
_DENSE_FIRST = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
_EVERY = ("decoder_sparse_step", "moe_layer_interval")
_NO_SIZE = (  # of matrices
    *("moe_layer_end_index", "expert_capacity", "moe_capacity", "moe_jitter_eps", "moe_norm_min"),
    *("moe_loss_weight", "moe_routed_scaling_factor", "moe_router_scaling_factor"),
    *("use_expert_bias", "moe_renormalize", "moe_router_activation_func"),
)
_USUAL = {"moe_layer_freq": 1}  # a value that says nothing more
_KNOWN = {*_EXPERTS, *_CHOSEN, *_EXPERT_WIDTH, *_SHARED_WIDTH, *_SHARED, *_DENSE_FIRST, *_EVERY}


@dataclass(frozen=True)
class Decoder:
    """What of a decoder's configuration decides how much there is to do."""

    name: str
    windows: tuple[int, ...]  # of each layer, how many tokens it looks back on; 0: all
    q_width: int  # channels of all query heads
    kv_width: int  # and of all KV heads
    common: int  # elements of the matrices that every token meets, the output's apart
    head: int  # of the output matrix, which only sampled tokens meet
    expert: int = 0  # of one expert in one layer
    experts: int = 0  # in a layer
    chosen: int = 0  # of them, for one token
    expert_layers: int = 0

    def touched(self, tokens: float) -> float:
        """Return how many experts of a layer some tokens meet together, if they choose evenly."""
        if not self.experts:
            return 0.0
        missed = float((1 - self.chosen / self.experts) ** tokens)
        return self.experts * (1 - missed)

    def weights(self, tokens: float) -> float:
        """Return the elements that have to be read for some tokens, the output matrix apart."""
        return self.common + self.expert_layers * self.touched(tokens) * self.expert

    @property
    def active(self) -> int:
        """Elements that one token is multiplied by, the output matrix apart."""
        return self.common + self.expert_layers * self.chosen * self.expert

    @property
    def kv_elements(self) -> int:
        """Keys and values of one token in one layer."""
        return 2 * self.kv_width

    def attended(self, rows: float, seen: float) -> float:
        """Return rows that a token attends to, over all layers: `rows`, or a window's of `seen`."""
        return sum(min(window, seen) if window else rows for window in self.windows)


@dataclass(frozen=True)
class StepWork:
    """What there is to move and to compute."""

    bytes: float
    flops: float

    def limit(self, hardware: Hardware, dtype: str) -> Limit:
        return Limit(self.bytes / hardware.bytes_per_s, self.flops / hardware.rate(dtype))


@dataclass(frozen=True)
class Limit:
    """The least time of some work, by what bounds it."""

    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        return max(self.memory_s, self.compute_s)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_s >= self.compute_s else "compute"


def decode_step(
    decoder: Decoder,
    sessions: float,
    rows: float,
    seen: float,
    *,
    dtype: str,
    kv_dtype: str,
    read: float | None = None,
) -> StepWork:
    """Count one decoded token of each of some sessions.

    Parameters
    ----------
    sessions : float
        In one batch, so that weights are read once.
    rows, seen : float
        Of each session: live rows per (layer, KV head), and tokens ever seen, of which layers with
        a window read their last.
    dtype, kv_dtype : str
        Of weights and cache, names of `BYTES`.
    read : float, optional
        Bytes of K and V that a session's token reads, where an engine has counted them.
    """
    attended = decoder.attended(rows, seen)
    if read is None:
        read = session_bytes(decoder, rows, seen, kv_dtype)
    written = len(decoder.windows) * decoder.kv_elements * BYTES[kv_dtype]
    weights = decoder.weights(sessions) + decoder.head
    flops = 2 * (decoder.active + decoder.head) + 4 * decoder.q_width * attended
    return StepWork(weights * BYTES[dtype] + sessions * (read + written), sessions * flops)


def session_bytes(decoder: Decoder, rows: float, seen: float, kv_dtype: str) -> float:
    """Return bytes of the keys and values that a session's next token attends to."""
    return decoder.attended(rows, seen) * decoder.kv_elements * BYTES[kv_dtype]


def prefill(decoder: Decoder, tokens: int, *, dtype: str, kv_dtype: str) -> StepWork:
    """Count a prompt of so many tokens read in one pass, whose last one is sampled from."""
    pairs = sum(_pairs(tokens, window) for window in decoder.windows)
    rows = 2 * tokens * len(decoder.windows)  # written, and read by attention
    weights = decoder.weights(tokens) + decoder.head
    flops = 2 * tokens * decoder.active + 2 * decoder.head + 4 * decoder.q_width * pairs
    moved = weights * BYTES[dtype] + rows * decoder.kv_elements * BYTES[kv_dtype]
    return StepWork(moved, flops)


def _pairs(tokens: int, window: int) -> int:
    """Return how many (query, key) pairs causal attention has."""
    reach = min(window or tokens, tokens)
    return reach * (reach + 1) // 2 + (tokens - reach) * reach


def read_decoder(path: Path) -> Decoder:
    """Read a model folder's configuration; UsageError for a kind of layers not counted here."""
    facts, config = read_model(path), decoder_config(path)
    if facts.unevictable:
        raise UsageError(f"{path.name}: {facts.unevictable} are not counted by the roofline")
    hidden, layers = _number(path, config, "hidden_size"), facts.layers
    vocabulary = _number(path, config, "vocab_size")
    if not vocabulary:
        raise UsageError(f"{path / 'config.json'} has no vocab_size, which the roofline needs")
    q_width, kv_width = facts.q_heads * facts.head_dim, facts.kv_heads * facts.head_dim
    attention = hidden * (2 * q_width + 2 * kv_width)
    matrices = 2 if facts.family in _UNGATED else 3
    dense = matrices * hidden * (_number(path, config, "intermediate_size") or 4 * hidden)
    mixture = _mixture(path, config, matrices, layers)
    dense_layers, own = layers - mixture.layers, mixture.layers * mixture.beside
    return Decoder(
        *(path.name, facts.windows or (0,) * layers, q_width, kv_width),
        common=layers * attention + dense_layers * dense + own,
        head=hidden * vocabulary,
        expert=mixture.expert,
        experts=mixture.experts,
        chosen=mixture.chosen,
        expert_layers=mixture.layers,
    )


@dataclass(frozen=True)
class Mixture:
    """What a mixture of experts has in each of its layers; zeros of a dense model."""

    layers: int = 0
    expert: int = 0  # elements of one expert
    experts: int = 0
    chosen: int = 0
    beside: int = 0  # elements of the router and of experts that every token meets


def _mixture(path: Path, config: Mapping[str, Any], matrices: int, layers: int) -> Mixture:
    """Read what a mixture has; a UsageError for what says of one that is not counted here."""
    for name, value in config.items():
        of_experts = "expert" in name.lower() or "moe" in name.lower()
        known = name in _KNOWN or name in _NO_SIZE or _USUAL.get(name) == value
        if value and of_experts and not known:
            raise UsageError(
                f"{path.name}: the roofline does not know what {name} ({value}) says of experts"
            )

    def number(names: tuple[str, ...]) -> int:
        return _number(path, config, *names)

    hidden, experts, chosen = number(("hidden_size",)), number(_EXPERTS), number(_CHOSEN)
    if not experts:
        return Mixture()
    if not chosen:
        raise UsageError(
            f"{path.name} has {experts} experts and does not say how many a token chooses: one of "
            f"{', '.join(_CHOSEN)} is needed in its config.json"
        )
    width = number(_EXPERT_WIDTH)
    shared = number(_SHARED_WIDTH) or number(_SHARED) * width
    return Mixture(
        layers=len(_sparse(path, config, layers)),
        expert=matrices * hidden * width,
        experts=experts,
        chosen=chosen,
        beside=hidden * experts + matrices * hidden * shared,
    )


def _sparse(path: Path, config: Mapping[str, Any], layers: int) -> list[int]:
    """Return the layers that have experts."""
    first, step = _number(path, config, *_DENSE_FIRST), _number(path, config, *_EVERY) or 1
    end = _number(path, config, "moe_layer_end_index")
    last = end if end > 0 else layers - 1  # -1 is the last there is
    dense = config.get("mlp_only_layers") or ()
    return [
        i for i in range(layers) if first <= i <= last and i not in dense and (i + 1) % step == 0
    ]


def _number(path: Path, config: Mapping[str, Any], *names: str) -> int:
    """Return the first of some entries that is there, 0 if none is; a UsageError for no number."""
    name = next((name for name in names if config.get(name)), None)
    if name is None:
        return 0
    value = config[name]
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{path.name}: the roofline needs a whole number, {name} is {value!r}")
    return value


def document(decoder: Decoder) -> dict[str, Any]:
    return asdict(decoder) | {"active": decoder.active}
