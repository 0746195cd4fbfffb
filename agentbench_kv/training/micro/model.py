"""A small Qwen3 with Hugging Face's parameter names, written for training speed.

It computes what `Qwen3ForCausalLM` computes (a test compares the logits), takes explicit position
ids and saves a folder that `AutoModelForCausalLM.from_pretrained` loads.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812  the name all of torch uses
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True)
class MicroConfig:
    """Sizes of the model, under the names of `config.json`."""

    vocab_size: int = 704
    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e5
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32768


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float, gain: float = 1.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), gain))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), -1)
    return x * cos + turned * sin


class _Attention(nn.Module):
    # At gain 1 the largest logit is 8, too soft to single out one of a thousand keys.
    GAIN = 1.5

    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = config.head_dim
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        kv_inner = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, kv_inner, bias=False)
        self.v_proj = nn.Linear(width, kv_inner, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)
        self.q_norm = _Norm(config.head_dim, config.rms_norm_eps, self.GAIN)
        self.k_norm = _Norm(config.head_dim, config.rms_norm_eps, self.GAIN)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        rows, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(rows, length, self.heads, self.head_dim))
        k = self.k_norm(self.k_proj(x).view(rows, length, self.kv_heads, self.head_dim))
        v = self.v_proj(x).view(rows, length, self.kv_heads, self.head_dim).transpose(1, 2)
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = _rotate(q.transpose(1, 2), cos, sin), _rotate(k.transpose(1, 2), cos, sin)
        group = self.heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(rows, length, -1))
        return mixed


class _Mlp(nn.Module):
    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        width, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class _Layer(nn.Module):
    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        self.input_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _Norm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask)
        x = x + self.mlp(self.post_attention_layernorm(x))
        return x


class _Decoder(nn.Module):
    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _Norm(config.hidden_size, config.rms_norm_eps)


class MicroModel(nn.Module):
    """Decoder with tied embeddings."""

    def __init__(self, config: MicroConfig) -> None:
        super().__init__()
        self.config = config
        self.model = _Decoder(config)
        half = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
        self.register_buffer("frequencies", config.rope_theta**-half, persistent=False)
        self.frequencies: Tensor
        depth = 2 * config.num_hidden_layers
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                std = weight.shape[1] ** -0.5
                if "o_proj" in name or "down_proj" in name:
                    std /= math.sqrt(depth)
                nn.init.normal_(weight, 0.0, std)

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        """Return the logits [rows, length, vocabulary].

        Ids and logical positions are [rows, length]; the mask [length, length] says what each token
        may attend to, causal by default.
        """
        angles = positions[:, None, :, None].float() * self.frequencies
        angles = torch.cat((angles, angles), -1)
        cos, sin = angles.cos(), angles.sin()
        x = self.model.embed_tokens(ids)
        for layer in self.model.layers:
            x = layer(x, cos, sin, mask)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def save_model(model: MicroModel, folder: Path, end: int, pad: int) -> None:
    """Write the weights and configuration in Hugging Face's layout.

    `end` and `pad` are the token ids that end a message and fill a row.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    partial = folder / "model.safetensors.partial"
    save_file(state, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(folder / "model.safetensors")
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        **asdict(model.config),
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "max_window_layers": model.config.num_hidden_layers,
        "rope_scaling": None,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": pad,
        "torch_dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    generation = {"eos_token_id": end, "pad_token_id": pad, "do_sample": False}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n", "utf-8")


def load_model(folder: Path) -> MicroModel:
    """Load what `save_model` wrote."""
    found = json.loads((folder / "config.json").read_text("utf-8"))
    names = MicroConfig.__dataclass_fields__
    model = MicroModel(MicroConfig(**{name: found[name] for name in names}))
    model.load_state_dict(load_file(folder / "model.safetensors"))
    return model
