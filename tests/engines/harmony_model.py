"""A tiny gpt-oss that answers in harmony: random weights, taught to call a tool and to report.

It looks up page 7 when it is asked to, and says so when it has read it. Attention has sinks and
alternating windows, so that what it writes depends on both kinds of layers.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from agentbench_kv.adapters.base import Reply
from agentbench_kv.engines.base import Engine
from agentbench_kv.gateway import open_gateway
from agentbench_kv.gateway.client import InProcessClient
from agentbench_kv.gateway.reports import SessionReport

WINDOW = 32
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
        },
    }
]
_SPECIAL = (
    *("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>"),
    *("<|return|>", "<|endoftext|>"),
)
_WORDS = (
    *("assistant", "analysis", "commentary", " to=functions.", "look_up", "json", "final", "user"),
    *(
        "developer",
        "functions.",
        " to=assistant",
        '{"page": ',
        "Read page ",
        "I need page ",
        "Done.",
    ),
)
_TEMPLATE = """{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif -%}
{%- for m in messages -%}
{%- if m.role == 'tool' -%}
<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>
{%- elif m.role == 'assistant' and m.tool_calls -%}
{%- if m.reasoning_content -%}
<|start|>assistant<|channel|>analysis<|message|>{{ m.reasoning_content }}<|end|>
{%- endif -%}
{%- set f = m.tool_calls[0].function -%}
<|start|>assistant<|channel|>commentary to=functions.{{ f.name }}<|constrain|>json<|message|>
{{- f.arguments | tojson }}<|call|>
{%- elif m.role == 'assistant' -%}
<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>
{%- else -%}
<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}"""


def harmony_tokenizer() -> Any:
    """Build a tokenizer of 256 bytes, harmony's markers, and the words that the model says."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in _SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in _WORDS])
    fast: Any = PreTrainedTokenizerFast
    special = {"eos_token": "<|return|>", "pad_token": "<|endoftext|>"}
    return fast(tokenizer_object=tokenizer, chat_template=_TEMPLATE, **special)


def page_text(number: int) -> str:
    """Return a tool's answer, long enough for events: letters that say nothing."""
    draw = random.Random(number)
    return json.dumps({"text": "".join(draw.choices("abcdefghij ", k=50))})


QUESTION = "Read page 7"
CALL = (
    "<|channel|>analysis<|message|>I need page 7<|end|><|start|>assistant<|channel|>"
    'commentary to=functions.look_up<|constrain|>json<|message|>{"page": 7}<|call|>'
)
REPORT = "<|channel|>final<|message|>Done.<|return|>"


def _lesson(tokenizer: Any, turns: int) -> tuple[list[int], list[int]]:
    """Return a session's ids, and the same as labels: -100 where others speak."""
    nobody = [{"role": "user", "content": ""}]
    whole = tokenizer.apply_chat_template(nobody, tools=TOOLS, tokenize=False)
    parts = [(whole.partition("<|start|>user")[0], False)]
    for _ in range(turns):
        parts += [(f"<|start|>user<|message|>{QUESTION}<|end|><|start|>assistant", False)]
        parts += [(CALL, True)]
        answer = page_text(random.randrange(10**6))
        tool = "<|start|>functions.look_up to=assistant<|channel|>commentary<|message|>"
        parts += [(f"{tool}{answer}<|end|><|start|>assistant", False), (REPORT, True)]
    ids: list[int] = []
    labels: list[int] = []
    for text, own in parts:
        new = tokenizer.encode(text)
        ids += new
        labels += new if own else [-100] * len(new)
    return ids, labels


def write_model(folder: Path, steps: int = 100) -> float:
    """Teach a model of random weights, write it, and return its last loss."""
    tokenizer = harmony_tokenizer()
    ends = tokenizer.convert_tokens_to_ids(["<|return|>", "<|call|>"])
    config = AutoConfig.for_model(
        "gpt_oss",
        vocab_size=len(tokenizer),
        hidden_size=96,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=4096,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 1024,
        },
        initializer_range=0.05,
        eos_token_id=ends,
        pad_token_id=tokenizer.pad_token_id,
    )
    random.seed(0)
    torch.manual_seed(0)
    network = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for layer in network.model.layers:
            layer.self_attn.sinks.normal_(0, 1)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    loss = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1, (step + 1) / 20) * (1 - step / steps)
        ids, labels = _lesson(tokenizer, random.choice((1, 2, 5)))
        out = network(input_ids=torch.tensor([ids]), labels=torch.tensor([labels]))
        optimizer.zero_grad()
        out.loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        loss = float(out.loss.detach())
    network.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return loss


@dataclass
class HeldSession:
    """What came of a session of some turns, each a question, a call, a page and a report."""

    replies: list[Reply]
    tokens: list[int]
    phases: list[int]
    report: SessionReport


def hold_session(engine: Engine, turns: int) -> HeldSession:
    """Ask the same question again and again, and answer the calls that come."""
    gateway = open_gateway(engine, default_max_tokens=64)
    messages: list[Any] = []
    replies = []
    with InProcessClient(gateway, "session", temperature=0.0) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": QUESTION})
            for _ in range(2):
                replies.append(client.chat(messages, TOOLS))
                messages.append(replies[-1].message)
                messages += [
                    {"role": "tool", "tool_call_id": call["id"], "content": page_text(turn)}
                    for call in replies[-1].tool_calls
                ]
        tokens, phases = gateway.token_log("session")
        report = client.report
    return HeldSession(replies, list(tokens), list(phases), report)
