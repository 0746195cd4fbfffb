"""What llama.cpp's rows and its flash attention do to what a model says next, on real text.

    PYTHONPATH=. ENVIRONMENT/bin/python benchmarks/llamacpp_exactness.py MODEL.gguf [--prompt 8192]

The same text is read under each setting, its last tokens one by one, as an answer is decoded. The
distribution behind each token is compared with that of rows in float32 under plain attention, of
the same weights: KL divergence in nats, and how often the likeliest token is another one. Flash
attention has code of its own for a prompt, for a decoded token, and for several in a step
(`--sessions`), so these are told apart. ENVIRONMENT is the folder of `llamacpp` that
`kvbench env list` names.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from agentbench_kv.engines.llamacpp.models import KV_ROW_TYPES, ROW_TYPES
from agentbench_kv.engines.llamacpp.server.context import Context, DecodeBatch
from agentbench_kv.engines.llamacpp.server.library import llama

CHUNK = 512  # tokens of a decode of a prompt; of the last one all are compared
TEXTS = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))


@dataclass(frozen=True)
class Settings:
    """What a context is asked for."""

    rows: str  # the type of cached keys and values
    flash: bool

    def __str__(self) -> str:
        return f"{self.rows}, {'flash' if self.flash else 'plain'} attention"


REFERENCE = Settings("float32", flash=False)
ARMS = (
    Settings("float32", flash=True),
    Settings("float16", flash=False),
    Settings("float16", flash=True),
    Settings("q8_0", flash=True),
)


@dataclass(frozen=True)
class Said:
    """Logits [tokens, vocabulary] in float32, as a prompt was read and one token after another."""

    read: torch.Tensor
    steps: torch.Tensor


def tokenized(model: Path, texts: list[Path], count: int) -> list[int]:
    """Return the first tokens of some files, as the model's own tokenizer splits them."""
    binding = llama()
    options = binding.llama_model_default_params()
    options.vocab_only = True
    loaded = binding.llama_model_load_from_file(str(model).encode(), options)
    text = "\n".join(path.read_text() for path in texts).encode()
    found = (binding.llama_token * len(text))()
    vocabulary = binding.llama_model_get_vocab(loaded)
    number = binding.llama_tokenize(vocabulary, text, len(text), found, len(text), False, False)
    binding.llama_model_free(loaded)
    if number < count:
        raise SystemExit(f"the text has {number} tokens, {count} are needed; name more by --text")
    return list(found[:count])


def play(model: Path, settings: Settings, tokens: list[int], options: argparse.Namespace) -> Said:
    """Read the tokens, all but the last in chunks, and keep what is said behind them."""
    sessions = range(options.sessions)
    context = Context(
        model,
        cells=len(tokens) + options.sessions * options.steps + CHUNK,
        sequences=options.sessions + 1,
        row_type=(ROW_TYPES | KV_ROW_TYPES)[settings.rows],
        batch=CHUNK,
        threads=options.threads,
        flash=settings.flash,
    )
    first = len(tokens) - options.steps

    for start in range(0, first, CHUNK):
        places = list(range(start, min(start + CHUNK, first)))
        wanted = list(range(len(places))) if places[-1] + 1 == first else []
        chunk = DecodeBatch([tokens[i] for i in places], places, [0] * len(places), wanted)
        read = context.decode(chunk)
    for session in sessions[1:]:
        context.share(0, session, 0, first)
    steps = []
    for at in range(first, len(tokens)):
        count = options.sessions
        held = DecodeBatch([tokens[at]] * count, [at] * count, list(sessions), [0])
        steps.append(context.decode(held))
    context.close()
    return Said(read, torch.cat(steps))


def divergences(base: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[float, bool]]:
    """Yield for each token the KL divergence in nats, and whether another one is likeliest."""
    for mine, theirs in zip(base.double(), other.double(), strict=True):
        log_p, log_q = mine.log_softmax(-1), theirs.log_softmax(-1)
        kl = float((log_p.exp() * (log_p - log_q)).sum())
        yield kl, bool(log_p.argmax() != log_q.argmax())


def row(base: torch.Tensor, other: torch.Tensor) -> str:
    """Return mean, worst and how many of all tokens changed, as cells of a table."""
    found = list(divergences(base, other))
    kls = [kl for kl, _ in found]
    changed = sum(each for _, each in found)
    return f"{sum(kls) / len(kls):.2g} | {max(kls):.2g} | {changed} of {len(found)}"


def main() -> None:
    """Read the options, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--prompt", type=int, action="append", help="repeatable (8192)")
    parser.add_argument("--steps", type=int, default=128, help="tokens that are read one by one")
    parser.add_argument("--sessions", type=int, default=1, help="that decode them side by side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--text", type=Path, action="append", help="files (our manual)")
    options = parser.parse_args()
    lengths = options.prompt or [8192]
    tokens = tokenized(options.model, options.text or TEXTS, max(lengths))
    print("| tokens | settings | a prompt's KL | worst | changed | single | worst | changed |")
    print("|--:|---|--:|--:|--:|--:|--:|--:|")
    for length in lengths:
        base = play(options.model, REFERENCE, tokens[:length], options)
        for arm in ARMS:
            said = play(options.model, arm, tokens[:length], options)
            cells = f"{row(base.read, said.read)} | {row(base.steps, said.steps)}"
            print(f"| {length:,} | {arm} | {cells} |", flush=True)
            del said
            gc.collect()


if __name__ == "__main__":
    main()
