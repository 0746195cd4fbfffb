"""The micro model's tokenizer: byte-level BPE over a closed vocabulary, built rather than trained.

Every merge is written down by rule, so that a code is always two tokens (its syllables), a name is
always one, and the words of the chat template are one each. Any other text falls back to syllables
and bytes and comes back unchanged.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentbench_kv.adapters.micro.episode import TRIGGER, auxiliary_reply, cursors
from agentbench_kv.adapters.micro.generate import (
    CURRICULUM,
    NAMES,
    PROFILES,
    SYLLABLES,
    generate,
    train_seed,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Tokens that decoding may skip."""

MARKERS = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"
)  # fmt: skip
"""Tokens that are text: they survive decoding, as the parsers of serving engines expect."""

SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Qwen2's pre-tokenizer, so that every engine knows it."""

HANDLE_PIECE = re.compile(r"[/#:=@~+,][a-z]+|[a-z]{4}")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer; the same one every time."""
    merges = _Merges()
    merges.add_all(SYLLABLES)
    syllables = {piece for piece in merges.vocabulary if len(piece) == 2}
    merges.add_all((*NAMES, *_words()))
    clashes = [pair for pair in merges.merges if syllables.issuperset(pair)]
    if clashes:
        raise ValueError(f"merges {clashes} would glue the syllables of a code together")
    tokens = (*SPECIALS, *MARKERS, *merges.vocabulary)
    vocabulary = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=merges.merges))
    core.pre_tokenizer = _pre_tokenizer()
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True) for token in SPECIALS])
    core.add_tokens([AddedToken(token, special=False, normalized=False) for token in MARKERS])
    wrapped = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
        model_max_length=32768,
    )
    wrapped.chat_template = Path(__file__).with_name("chat_template.jinja").read_text("utf-8")
    return wrapped


def save_tokenizer(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write the tokenizer and its chat template for any release of transformers."""
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text("utf-8"))
    # transformers 5 writes a class that its predecessors and other engines do not know.
    config["tokenizer_class"] = "PreTrainedTokenizerFast"
    path.write_text(json.dumps(config, indent=2) + "\n", "utf-8")


class _Merges:
    """A BPE merge table that grows by whole words, each spelled from what is there already."""

    def __init__(self) -> None:
        self.vocabulary = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
        self.merges: list[tuple[str, str]] = []
        self._ranks: dict[tuple[str, str], int] = {}

    def add_all(self, words: Iterable[str]) -> None:
        for word in words:
            # Spelled anew after each merge: an older one may apply to the result.
            while len(pieces := self._spell(word)) > 1:
                left, right = pieces[:2]
                self._ranks[left, right] = len(self.merges)
                self.merges.append((left, right))
                self.vocabulary[left + right] = None

    def _spell(self, word: str) -> list[str]:
        pieces = list(word)
        while True:
            ranked = [
                (self._ranks[pair], place)
                for place, pair in enumerate(pairwise(pieces))
                if pair in self._ranks
            ]
            if not ranked:
                return pieces
            place = min(ranked)[1]
            pieces[place : place + 2] = [pieces[place] + pieces[place + 1]]


def _pre_tokenizer() -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, to_bytes])


def _words() -> list[str]:
    """Collect what the template and the episodes' fixed texts consist of."""
    splitter = _pre_tokenizer()
    pieces = {piece for text in _texts() for piece, _ in splitter.pre_tokenize_str(text)}
    return sorted(piece for piece in pieces if not _random(piece))


def _random(piece: str) -> bool:
    """Tell pieces of handles, which must stay apart, from words."""
    fixed = {"sess", "pass", "crew", "keep", "done", "door", "page", "port", "plan", "name", "type"}
    fixed |= {"open", "scan", "ship", "read", "slip", "gate", "user", "tool"}
    return bool(HANDLE_PIECE.fullmatch(piece)) and piece not in fixed


def _texts() -> Iterator[str]:
    """Yield sample texts, cut at the markers."""
    yield from ("system", "user", "assistant", "keep", "done", "\n", "\n\n", "\n</tools>")
    yield TRIGGER
    # What steps are spelled out in came later: it is spelled in what there was.
    plain = (p for p in (*CURRICULUM, *PROFILES.values()) if not p.steps[1])
    for index, profile in enumerate(plain):
        for seed in range(8):
            episode = generate(train_seed(1 << 40 | index << 8 | seed), profile)
            yield f"{episode.system}\n\n<tools>\n"
            yield from (json.dumps(tool) + "\n" for tool in episode.tools)
            listed = cursors(episode, len(episode.turns))
            raws = [auxiliary_reply(listed), auxiliary_reply(listed[:1])]
            for turn in episode.turns:
                yield turn.text
                yield from (f"\n{call.result_json(7)}\n" for call in turn.calls)
                raws += [call.raw for call in turn.calls] + [turn.reply.raw]
            marker = "|".join(map(re.escape, MARKERS))
            yield from (part for raw in raws for part in re.split(marker, raw))
