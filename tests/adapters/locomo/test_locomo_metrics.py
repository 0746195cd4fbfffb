"""The metrics against values worked out by hand, and against nltk's own call."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.adapters.locomo import scoring as metrics
from agentbench_kv.errors import PrerequisiteError

needs_nltk = pytest.mark.skipif(
    metrics.find_spec("nltk") is None, reason="nltk absent: pip install 'agentbench-kv[locomo]'"
)
WORDS = st.lists(st.sampled_from(["a", "Cat", "sat", "mat.", "on,", "the", "7"])).map(" ".join)


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("7 May 2023", "7 May 2023", 1.0),
        ("may", "7 May 2023", 2 / 4),
        ("May, May; may!", "May", 2 / 3),  # a set: {may, may;}
        ("Is it Oslo?", "Oslo.", 2 / 4),
        ("cats", "cat", 0.0),
        ("", "Oslo", 0.0),
        (" . ", "Oslo", 0.0),
    ],
)
def test_f1_is_of_sets_of_words(answer, gold, value):
    assert metrics.f1(answer, gold) == pytest.approx(value)


@needs_nltk
@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("the cat", "the cat sat", math.exp(1 - 3 / 2)),
        ("the the the the", "the cat sat", 1 / 4),
        ("Oslo.", "oslo", 1 / 2),
        ("Turin", "Oslo", 0.0),
        ("", "Oslo", 0.0),
        (" 23 July ", "23 July", 1.0),
    ],
)
def test_bleu1_is_clipped_precision_with_a_brevity_penalty(answer, gold, value):
    assert metrics.bleu1(answer, gold) == pytest.approx(value, abs=1e-12)


@needs_nltk
@pytest.mark.parametrize(
    ("answer", "gold", "category", "value"),
    [
        ("running dogs", "The dog and a run", 4, 1.0),
        ("dog dog", "dog", 4, 2 / 3),  # a multiset, unlike Mem0's
        ("camping, pottery", "pottery, swimming", 1, 1 / 2),
        ("pottery and swimming", "pottery, swimming", 1, 2 / 3),
        ("Likely yes", "Likely yes; she likes it", 3, 1.0),
        ("Likely yes", "Likely yes; she likes it", 4, 4 / 7),
        ("", "Oslo", 1, 0.0),
        ("the", "a", 2, 0.0),
    ],
)
def test_the_authors_f1(answer, gold, category, value):
    assert metrics.f1_authors(answer, gold, category) == pytest.approx(value)


@needs_nltk
@given(WORDS, WORDS, st.sampled_from([1, 2, 3, 4]))
def test_every_metric_is_within_0_and_1(answer, gold, category):
    for value in (
        metrics.f1(answer, gold),
        metrics.bleu1(answer, gold),
        metrics.f1_authors(answer, gold, category),
    ):
        assert 0.0 <= value <= 1.0 + 1e-12


@needs_nltk
@given(WORDS.filter(str.strip), WORDS.filter(str.strip))
def test_bleu1_is_precision_times_penalty(answer, gold):
    from nltk.tokenize import NLTKWordTokenizer

    said, wanted = (NLTKWordTokenizer().tokenize(text.lower()) for text in (answer, gold))
    hits = sum(min(said.count(word), wanted.count(word)) for word in set(said))
    penalty = min(1.0, math.exp(1 - len(wanted) / len(said)))
    assert metrics.bleu1(answer, gold) == pytest.approx(penalty * hits / len(said), abs=1e-12)


@given(WORDS)
def test_f1_is_symmetric_in_its_words(text):
    other = " ".join(reversed(text.split()))
    assert metrics.f1(text, other) == (1.0 if text.strip(" .,") else 0.0)


def test_without_nltk_the_command_is_named(monkeypatch):
    monkeypatch.setattr(metrics, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(PrerequisiteError, match=r"pip install 'agentbench-kv\[locomo\]'"):
        metrics.require_nltk()


@needs_nltk
def test_gold_answers_of_the_published_file_are_worth_1(published):
    for talk in published.conversations.values():
        for question in talk.questions:
            gold = question.answer
            assert metrics.f1(gold, gold) == 1.0
            assert metrics.bleu1(gold, gold) == pytest.approx(1.0, abs=1e-12)
            if question.category != metrics.OPEN_DOMAIN:
                assert metrics.f1_authors(gold, gold, question.category) > 0.0
