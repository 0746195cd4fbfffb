"""What the engine suite works on: tiny models in folders, sessions of random ids, two engines.

Every engine can load the models; the sessions come from fixed seeds.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from agentbench_kv.conformance.driver import Driver, TurnPlan, calibrated_for
from agentbench_kv.conformance.reference import random_model
from agentbench_kv.engines.base import Capability, EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method

FAMILIES = ("qwen3", "llama")
CONTEXT = 2048
"""Positions of the models: few, so that a small pool and the last position are reached soon."""
VOCAB = 320
BUDGET = 96
INTERVAL = 32
LARGE_POOL = 8 * CONTEXT  # cached tokens over all sessions
SMALL_POOL = CONTEXT + 256  # serving engines want to hold one session of the full context

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
)  # fmt: skip
_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Sessions = dict[str, list[TurnPlan]]


def write_model(folder: Path, family: str, seed: int = 0) -> Path:
    """Write a decoder with 2 KV heads of 64 dimensions and a byte-level tokenizer; return `folder`.

    Weights are drawn wide enough that attention and logits are peaked: a wrong row changes tokens,
    a rounding error does not. `family` is one of `FAMILIES`, a model type of transformers.
    """
    tokenizer = suite_tokenizer()
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


def suite_tokenizer() -> Any:
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
    special = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    return fast(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **special)


def prompt(length: int, seed: int) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(VOCAB, (length,), generator=generator).tolist())


def long_sessions() -> Sessions:
    # The first: prompts longer than a prefill chunk, of one id and of none, and 235 decoded tokens,
    # so at least five events.
    sizes = {
        "long": ((60, 45), (600, 60), (1, 45), (0, 40), (33, 45)),
        "late": ((90, 20), (300, 40), (20, 40)),
        "brief": ((80, 33), (65, 20), (40, 12)),
    }
    return {
        name: [TurnPlan(prompt(n, 100 * i + j), out) for j, (n, out) in enumerate(turns)]
        for i, (name, turns) in enumerate(sizes.items())
    }


def crowd(sessions: int = 10) -> Sessions:
    """Make sessions whose prompts together are twice what the models' context holds."""
    first = 2 * CONTEXT // sessions
    return {
        f"s{i}": [TurnPlan(prompt(first, 1000 + i), 40), TurnPlan(prompt(50, 2000 + i), 40)]
        for i in range(sessions)
    }


class Fixture:
    """Runs engines on a model folder as `write_model` writes it; at most one under test at a time.

    `cls` is an engine class with `create(options)`; `engine_args` and `device` go into its options.
    What it is compared with is on the CPU.
    """

    def __init__(
        self,
        cls: Any,
        folder: Path,
        engine_args: Mapping[str, str] | None = None,
        device: str = "cpu",
    ) -> None:
        self.codec = TokenCodec(load_tokenizer(folder))
        self.network = load_network(folder)
        self.family = str(self.network.config.model_type)
        self._cls = cls
        self._folder = folder
        self._engine_args = engine_args or {}
        self.device = device
        self._driver: Driver | None = None
        self._pool = 0

    def has(self, capability: Capability) -> bool:
        """Whether the engine under test is able to do something."""
        return capability in self._cls.capabilities

    def method(self, name: str) -> Method:
        """Build a method with the suite's budget and interval."""
        if not make_method(name, 1 << 20).compresses:
            return make_method(name, None)
        method = make_method(name, BUDGET, {"interval": INTERVAL})
        return calibrated_for(self.network, method)

    def check_needs(self, method: Method) -> None:
        """Refuse a method the engine under test lacks something for, as a run does."""
        missing = method.needs - {capability.value for capability in self._cls.capabilities}
        if missing:
            raise UsageError(f"{self._cls.__name__} has no {min(missing)}")

    def driver(self, method: Method, pool: int = LARGE_POOL) -> Driver:
        """Return the engine under test with a method: the running one where it can change."""
        if self._driver is not None:
            if self._pool == pool and _can_run(self._driver, method):
                return self._driver
            self.close()
        options = replace(self._options(method, pool), device=self.device)
        self._driver = Driver(self._cls, options, self.codec)
        self._pool = pool
        return self._driver

    @contextmanager
    def reference(self, method: Method) -> Iterator[Driver]:
        """Run the embedded engine, on the CPU."""
        driver = Driver(EmbeddedEngine, self._options(method, LARGE_POOL), self.codec)
        try:
            yield driver
        finally:
            driver.close()

    def close(self) -> None:
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _options(self, method: Method, pool: int) -> EngineOptions:
        plain = EngineOptions(str(self._folder), method, device="cpu", max_live_tokens=pool)
        return replace(plain, engine_args=self._engine_args)


@contextmanager
def open_fixture(
    cls: Any, family: str, engine_args: Mapping[str, str], device: str = "cpu"
) -> Iterator[Fixture]:
    """Write a family's model to a temporary folder and work on it."""
    with tempfile.TemporaryDirectory(prefix="kvbench-model-") as folder:
        fixture = Fixture(cls, write_model(Path(folder) / family, family), engine_args, device)
        try:
            yield fixture
        finally:
            fixture.close()


def _can_run(driver: Driver, method: Method) -> bool:
    """Return whether a running engine has the method, or could change to it."""
    # `full` is the engine as shipped: other flags, so another start.
    as_shipped = "full" in (driver.method.name, method.name)
    return driver.method == method or (not as_shipped and driver.reconfigure(method))
