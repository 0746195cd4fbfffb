from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from agentbench_kv.engines.base import Generation, Sampling
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.gateway import Gateway

sys.path.insert(0, str(Path(__file__).parent))  # gateway_calls

# Renders as Qwen3 does: tools in the system message, tool results in a user message, thoughts of
# turns before the last user message dropped.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools' }}{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for m in messages %}
{%- if m.forbidden %}{{ raise_exception('not this message') }}
{%- elif m.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.last %}
{{- '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}{%- endif %}
{{- m.content }}
{%- for call in m.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' }}
{%- endfor %}{{- '<|im_end|>\\n' }}
{%- elif m.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{%- endif %}
{%- elif m.role == 'user' %}{{ '<|im_start|>user\\n' + m.content + '<|im_end|>\\n' }}
{%- elif m.role == 'system' %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""

CORPUS = [
    "the weather in the town is fine and the tool says so",
    '{"name": "get_weather", "arguments": {"city": "Paris"}}',
    "user assistant system tool ipython think tool_call tool_response",
    "<think>\n</think>\n\n<tool_call>\n</tool_call> <tool_response>\n</tool_response>",
]
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKERS = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def make_tokenizer(markers: list[str], template: str = TEMPLATE) -> Any:
    """Return a byte-level BPE tokenizer with a few merges; only `markers` are single tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 20, trainer)
    core.add_tokens(markers)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return make_tokenizer(MARKERS)


@pytest.fixture(scope="session")
def full_tokenizer() -> Any:
    return make_tokenizer([*MARKERS, "<tool_response>", "</tool_response>"])


@pytest.fixture(scope="session")
def tokenizer_path(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture
def engine_of(tokenizer_path: Path) -> Callable[..., ScriptedEngine]:
    """Build an engine that answers every session with the given texts, in order."""

    def build(*texts: str, **options: Any) -> ScriptedEngine:
        return ScriptedEngine(lambda _: texts, tokenizer_path=tokenizer_path, **options)

    return build


@pytest.fixture
def gateway_of(engine_of: Callable[..., ScriptedEngine]) -> Callable[..., Gateway]:
    """Build a gateway whose sessions answer with the given texts, in order."""

    def build(*texts: str, context_limit: int = 1 << 20, **options: Any) -> Gateway:
        return Gateway(engine_of(*texts, context_limit=context_limit), **options)

    return build


class Slow(ScriptedEngine):
    """Waits after some free tokens until it is told to go on, or is cancelled."""

    free = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go = threading.Event()
        self.running = threading.Semaphore(0)
        self.generations: list[Generation] = []

    def generate(self, session: str, sampling: Sampling) -> Generation:
        generation = super().generate(session, sampling)
        cancelled = threading.Event()
        cancel, iterate = generation.cancel, generation.__iter__

        def stepped() -> Iterator[int]:
            for count, token in enumerate(iterate()):
                while count >= self.free and not (self.go.is_set() or cancelled.is_set()):
                    time.sleep(0.002)
                yield token

        class Stepped(Generation):
            def __iter__(inner) -> Iterator[int]:  # noqa: N805
                yield from stepped()
                inner.finish_reason = generation.finish_reason

            def cancel(inner) -> None:  # noqa: N805
                cancelled.set()
                cancel()

        made = Stepped()
        self.generations.append(made)
        self.running.release()
        return made


@pytest.fixture
def slow(tokenizer_path: Any) -> Iterator[Slow]:
    engine = Slow(lambda _: ["word " * 200] * 3, tokenizer_path=tokenizer_path)
    yield engine
    engine.go.set()
