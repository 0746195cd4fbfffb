"""How well encoders find LoCoMo's evidence, without any model: evidence recall at k.

    KVBENCH_DATA=FOLDER python benchmarks/locomo_retrieval.py [ENCODER ...]

Every question of categories 1 to 4 is searched for among its conversation's utterances, each as
`speaker: text [image: caption]`. Encoders are `wordllama`, `hash` or folders,
with `:plain` not fitted to what is searched among; BM25 and the last k
utterances stand beside. The figures are those of docs/locomo.md.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace

from agentbench_kv.adapters.browser.search import Bm25Index, DenseIndex
from agentbench_kv.adapters.locomo.data import CATEGORIES, Dialogue, load
from agentbench_kv.adapters.locomo.disputed import all_disputed
from agentbench_kv.adapters.locomo.evidence import share
from agentbench_kv.adapters.locomo.task import spoken
from agentbench_kv.encoders.loading import encoder_sha, load_encoder

KS = (5, 10, 20, 50)
Search = Callable[[str, int], list[int]]


def main(encoders: Sequence[str]) -> None:
    talks = list(load().conversations.values())
    print("search | " + " | ".join(f"@{k}" for k in KS) + " | undisputed @10 | ms a question")
    for name in ("last k", "bm25", *encoders):
        row(name, talks)


def row(name: str, talks: Sequence[Dialogue]) -> None:
    """Print an encoder's recall: means over questions, undisputed ones, and by category."""
    found: dict[object, list[float]] = {}
    seconds = 0.0
    for talk in talks:
        ids = [*talk.utterances]
        search = index(name, [spoken(each) for each in talk.utterances.values()])
        for question in talk.questions:
            if not question.evidence:
                continue
            started = time.perf_counter()
            best = search(question.text, max(KS))
            seconds += time.perf_counter() - started
            for k in KS:
                part = share(question, {ids[number] for number in best[:k]}) or 0.0
                found.setdefault(k, []).append(part)
                if k == 10:
                    found.setdefault(CATEGORIES[question.category], []).append(part)
                    if question.index not in all_disputed()[talk.id]:
                        found.setdefault("undisputed", []).append(part)
    asked = len(found[10])
    keys = (*KS, "undisputed", *CATEGORIES.values())
    mean = {key: f"{100 * sum(found[key]) / len(found[key]):.1f}" for key in keys}
    print(
        " | ".join([name, *(mean[k] for k in (*KS, "undisputed")), f"{1e3 * seconds / asked:.2f}"])
    )
    print(
        "   @10 by category: " + ", ".join(f"{each} {mean[each]}" for each in CATEGORIES.values())
    )


def index(name: str, texts: Sequence[str]) -> Search:
    if name == "last k":
        return lambda _, k: list(range(len(texts)))[::-1][:k]
    if name == "bm25":
        return Bm25Index.build(texts).search
    plain = name.removesuffix(":plain")
    encoder, sha = load_encoder(plain), encoder_sha(plain)
    if plain == name:
        return DenseIndex.build(texts, encoder, sha).search
    return DenseIndex.build(texts, SimpleNamespace(encode=encoder.encode), sha).search  # not fitted


if __name__ == "__main__":
    main(sys.argv[1:] or ["hash", "wordllama:plain", "wordllama"])
