"""LoCoMo's metrics of an answer.

By words: F1 and BLEU-1 as Mem0's evaluation has them, F1 as LoCoMo's authors do. The two F1s are
different figures: Mem0 compares sets of words; the authors compare multisets of stems, take the
parts of a multi-hop answer one by one, and cut the explanation off an open-domain one. BLEU-1 is
nltk's over the tokens of its Penn Treebank word tokenizer. Mem0 first splits the text into
sentences with a model that has to be downloaded; without it only full stops inside an answer of
several sentences are cut differently.

By a model: cosine similarity and BERTScore, from folders the user names or not at all: another
model gives figures that look alike and mean something else.
"""

from __future__ import annotations

import re
import string
import threading
from collections import Counter
from collections.abc import Callable
from functools import cache, cached_property
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from agentbench_kv.encoders.loading import load_encoder
from agentbench_kv.errors import PrerequisiteError, UsageError

MULTI_HOP = 1
OPEN_DOMAIN = 3
_MEM0_SPACES = str.maketrans(dict.fromkeys(".,!?", " "))
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)
_LITTLE_WORDS = re.compile(r"\b(?:a|an|the|and)\b")
Compare = Callable[[str, str], float]  # from answer and gold answer to a figure


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

    words = {"tokenize": NLTKWordTokenizer().tokenize, "stem": PorterStemmer().stem}
    bleu = {"sentence_bleu": sentence_bleu, "smoothing": SmoothingFunction().method1}
    return SimpleNamespace(**words, **bleu)


class _Metric:
    """A model that is loaded at the first comparison and used by one thread at a time."""

    setting: ClassVar[str]
    package: ClassVar[str]

    def __init__(self, folder: Path) -> None:
        if find_spec(self.package.replace("-", "_")) is None:
            raise PrerequisiteError(
                f"{self.setting} needs {self.package}: pip install {self.package}"
            )
        if not folder.is_dir():
            raise PrerequisiteError(
                f"{self.setting}={folder}: no such folder; name a local copy of a model"
            )
        self._folder = folder
        self._lock = threading.Lock()

    def __call__(self, answer: str, gold: str) -> float:
        if not answer.strip():
            return 0.0  # an empty answer
        with self._lock:
            return self._compare(answer, gold)

    def _compare(self, answer: str, gold: str) -> float:
        raise NotImplementedError


class Similarity:
    """Cosine of two embeddings, in [-1, 1]; Mem0 uses all-MiniLM-L6-v2.

    Another encoder gives figures that look alike and mean something else: the run says which.
    """

    def __init__(self, name: str) -> None:
        try:
            self._encoder = load_encoder(name)
        except PrerequisiteError as error:
            raise PrerequisiteError(f"similarity_model: {error}") from error

    def __call__(self, answer: str, gold: str) -> float:
        if not answer.strip():
            return 0.0  # an empty answer
        said, wanted = np.asarray(self._encoder.encode([answer, gold]), np.float64)
        lengths = float(np.linalg.norm(said) * np.linalg.norm(wanted))
        return max(-1.0, min(1.0, float(said @ wanted) / lengths)) if lengths else 0.0


class BertScore(_Metric):
    """BERTScore F1 as LoCoMo's authors use it: rescaled with the English baseline, at least 0.

    The folder's name (`roberta-large`) says which layer and which baseline count.
    """

    setting, package = "bertscore_model", "bert-score"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        (package,) = find_spec("bert_score").submodule_search_locations  # type: ignore[union-attr,misc]
        self._baseline = Path(package) / "rescale_baseline" / "en" / f"{folder.name}.tsv"
        if not self._baseline.is_file():
            raise UsageError(
                "bertscore_model: bert-score has no English baseline for a model named "
                f"{folder.name!r}; name a folder such as roberta-large"
            )

    @cached_property
    def _model(self) -> Any:
        from bert_score import BERTScorer
        from bert_score.utils import model2layers

        return BERTScorer(
            model_type=str(self._folder),
            num_layers=model2layers[self._folder.name],
            lang="en",
            rescale_with_baseline=True,
            baseline_path=str(self._baseline),
            device="cpu",
        )

    def _compare(self, answer: str, gold: str) -> float:
        said, wanted = normalised(answer), normalised(gold)
        if not said or not wanted:
            return 0.0
        *_, found = self._model.score([said], [wanted])
        return min(1.0, max(0.0, float(found[0])))
