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
from functools import cache
from importlib.util import find_spec
from statistics import fmean
from types import SimpleNamespace

from agentbench_kv.errors import PrerequisiteError

MULTI_HOP = 1
OPEN_DOMAIN = 3
_MEM0_SPACES = str.maketrans(dict.fromkeys(".,!?", " "))
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LITTLE_WORDS = re.compile(r"\b(?:a|an|the|and)\b")


def require_nltk() -> None:
    if find_spec("nltk") is None:
        raise PrerequisiteError(
            "locomo/qa needs nltk for BLEU-1 and for the authors' F1: "
            "pip install 'agentbench-kv[locomo]'"
        )


def f1(answer: str, gold: str) -> float:
    """Return Mem0's F1, in [0, 1]: over sets of lower-case words, `. , ! ?` taken as spaces."""
    said, wanted = (set(text.lower().translate(_MEM0_SPACES).split()) for text in (answer, gold))
    return _harmonic(len(said & wanted), len(said) + len(wanted))


def bleu1(answer: str, gold: str) -> float:
    """Return BLEU-1 with smoothing method 1, in [0, 1]."""
    tools = _nltk()
    said, wanted = (tools.tokenize(text.strip().lower()) for text in (answer, gold))
    if not said:
        return 0.0
    weights = (1, 0, 0, 0)
    found = tools.sentence_bleu([wanted], said, weights, smoothing_function=tools.smoothing)
    return float(found)


def f1_authors(answer: str, gold: str, category: int) -> float:
    """Return the authors' F1, in [0, 1].

    Of a multi-hop gold answer the parts between commas are looked for one by one; of an open-domain
    one only the text before the first semicolon counts.
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


def _stems(text: str) -> Counter[str]:
    return Counter(_nltk().stem(word) for word in normalised(text).split())


def _stem_f1(said: Counter[str], wanted: Counter[str]) -> float:
    return _harmonic((said & wanted).total(), said.total() + wanted.total())


def _harmonic(common: int, words: int) -> float:
    """Return the harmonic mean of precision and recall, from the words of both answers."""
    return 2 * common / words if common else 0.0


@cache
def _nltk() -> SimpleNamespace:
    """Return what is used of nltk; importing it takes a moment."""
    require_nltk()
    from nltk.stem import PorterStemmer
    from nltk.tokenize import NLTKWordTokenizer
    from nltk.translate.bleu_score import SmoothingFunction, sentence_bleu

    return SimpleNamespace(
        tokenize=NLTKWordTokenizer().tokenize,
        stem=PorterStemmer().stem,
        sentence_bleu=sentence_bleu,
        smoothing=SmoothingFunction().method1,
    )
