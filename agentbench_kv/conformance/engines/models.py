"""Tiny random models in folders, as every engine can load them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from agentbench_kv.conformance.masked_reference import random_model

FAMILIES = ("qwen3", "llama")
CONTEXT = 2048
"""Positions of the models: few, so that a small pool and the last position are reached soon."""
VOCAB = 320
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
)  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a decoder with 2 KV heads of 64 dimensions and a byte-level tokenizer; return `folder`.

    Weights are drawn wide enough that attention and logits are peaked: a wrong row changes tokens,
    a rounding error does not. `family` is one of `FAMILIES`, a model type of transformers.
    """
    tokenizer = _tokenizer()
    network = random_model(
        family,
        seed=seed,
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=CONTEXT,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    _quiet()
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def load_network(folder: Path) -> Any:
    """Load a written model as plain Hugging Face runs it, in float32 on the CPU."""
    from transformers import AutoModelForCausalLM

    _quiet()
    causal_lm: Any = AutoModelForCausalLM
    return causal_lm.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()


def _quiet() -> None:
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def _tokenizer() -> Any:
    """Build a tokenizer of 256 bytes, the markers of Qwen's chat format, and fillers."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    fillers = VOCAB - len(letters) - len(_SPECIAL) - len(_MARKERS)
    plain = [*_MARKERS, *(f"<filler_{i}>" for i in range(fillers))]
    tokenizer.add_tokens([AddedToken(text, special=False) for text in plain])
    fast: Any = PreTrainedTokenizerFast
    return fast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=_TEMPLATE,
    )
