"""The metrics by words: F1 and BLEU-1 as Mem0's evaluation has them, F1 as LoCoMo's authors do.

The two F1s are different figures. Mem0 compares sets of words; the authors compare multisets of
stems, take the parts of a multi-hop answer one by one, and cut the explanation off an open-domain
one. Both were written anew from the definitions.

BLEU-1 is nltk's over the tokens of its Penn Treebank word tokenizer. Mem0 calls
`nltk.word_tokenize`, which first splits the text into sentences with a model that has to be
downloaded; without it only full stops inside an answer of several sentences are cut differently.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Collection
from functools import cache
from importlib.util import find_spec
from statistics import fmean
from typing import Any

from agentbench_kv.errors import PrerequisiteError

MULTI_HOP = 1
OPEN_DOMAIN = 3
_MEM0_SPACES = str.maketrans(dict.fromkeys(".,!?", " "))
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LITTLE_WORDS = re.compile(r"\b(?:a|an|the|and)\b")


def require_nltk() -> None:
    """Raise PrerequisiteError if nltk is not installed."""
    if find_spec("nltk") is None:
        raise PrerequisiteError(
            "locomo/qa needs nltk for BLEU-1 and for the authors' F1: "
            "pip install 'agentbench-kv[locomo]'"
        )


def f1(answer: str, gold: str) -> float:
    """Return Mem0's F1, in [0, 1]: over sets of lower-case words, `. , ! ?` taken as spaces."""
    said, wanted = _mem0_words(answer), _mem0_words(gold)
    return _harmonic(len(said & wanted), said, wanted)


def bleu1(answer: str, gold: str) -> float:
    """Return BLEU-1 with smoothing method 1, in [0, 1]."""
    tools = _nltk()
    said, wanted = (tools.tokenize(text.strip().lower()) for text in (answer, gold))
    if not said:
        return 0.0
    return float(
        tools.sentence_bleu(
            [wanted], said, weights=(1, 0, 0, 0), smoothing_function=tools.smoothing
        )
    )


def f1_authors(answer: str, gold: str, category: int) -> float:
    """Return the authors' F1, in [0, 1].

    Parameters
    ----------
    answer, gold : str
    category : int
        1: the parts between the commas of the gold answer are looked for one by one. 3: only what
        stands before its first semicolon counts.
    """
    if category == OPEN_DOMAIN:
        gold = gold.partition(";")[0]
    if category != MULTI_HOP:
        return _stem_f1(_stems(answer), _stems(gold))
    said = [_stems(part) for part in answer.split(",")]
    return fmean(max(_stem_f1(each, _stems(part)) for each in said) for part in gold.split(","))


def normalised(text: str) -> str:
    """Return a text as the authors compare it: lower case, no punctuation, articles or `and`."""
    return " ".join(_LITTLE_WORDS.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())


def _mem0_words(text: str) -> set[str]:
    return set(text.lower().translate(_MEM0_SPACES).split())


def _stems(text: str) -> Counter[str]:
    return Counter(_nltk().stem(word) for word in normalised(text).split())


def _stem_f1(said: Counter[str], wanted: Counter[str]) -> float:
    common = (said & wanted).total()
    return _harmonic(common, list(said.elements()), list(wanted.elements()))


def _harmonic(common: int, said: Collection[str], wanted: Collection[str]) -> float:
    """Return the harmonic mean of precision and recall."""
    return 2 * common / (len(said) + len(wanted)) if common else 0.0


class _Nltk:
    """What is used of nltk; importing it takes a moment."""

    def __init__(self) -> None:
        require_nltk()
        from nltk.stem import PorterStemmer
        from nltk.tokenize import NLTKWordTokenizer
        from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

        self.tokenize: Any = NLTKWordTokenizer().tokenize
        self.stem: Any = PorterStemmer().stem
        self.sentence_bleu: Any = sentence_bleu
        self.smoothing: Any = SmoothingFunction().method1


@cache
def _nltk() -> _Nltk:
    return _Nltk()
