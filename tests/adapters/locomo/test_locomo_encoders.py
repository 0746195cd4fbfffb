"""Metrics by a model: present only with a model, and what is refused."""

import sys
import textwrap

import pytest

from agentbench_kv.adapters.locomo import scoring as encoders
from agentbench_kv.adapters.locomo.scoring import BertScore, Similarity
from agentbench_kv.errors import PrerequisiteError, UsageError

SENTENCES = """
import numpy as np

class SentenceTransformer:
    def __init__(self, path, device, local_files_only):
        assert local_files_only

    def encode(self, texts, show_progress_bar):
        letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
        counts = np.array([[text.lower().count(c) for c in letters] for text in texts])
        return counts
"""
BERT = """
class BERTScorer:
    def __init__(self, model_type, num_layers, lang, rescale_with_baseline, baseline_path, device):
        assert (num_layers, lang, rescale_with_baseline) == (17, "en", True)
        assert baseline_path.endswith("rescale_baseline/en/roberta-large.tsv")

    def score(self, said, wanted):
        value = 2.0 * (said == wanted) - 1.0
        return [value], [value], [value]
"""


@pytest.fixture
def libraries(tmp_path, monkeypatch):
    """Stand-ins for the two libraries, so that the way they are called is tested without them."""
    for name, code in (("sentence_transformers", SENTENCES), ("bert_score", BERT)):
        package = tmp_path / "libraries" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(textwrap.dedent(code))
        for module in (name, f"{name}.utils"):
            monkeypatch.delitem(sys.modules, module, raising=False)
    bert = tmp_path / "libraries" / "bert_score"
    (bert / "utils.py").write_text("model2layers = {'roberta-large': 17}")
    (bert / "rescale_baseline" / "en").mkdir(parents=True)
    (bert / "rescale_baseline" / "en" / "roberta-large.tsv").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "libraries"))
    yield tmp_path
    for name in ("sentence_transformers", "bert_score"):
        for module in (name, f"{name}.utils"):
            sys.modules.pop(module, None)


def model(folder, name):
    (folder / name).mkdir()
    return folder / name


def test_similarity_is_the_cosine_of_two_texts(libraries):
    similarity = Similarity(str(model(libraries, "minilm")))
    assert similarity("abc", "cab") == pytest.approx(1.0)
    assert similarity("ab", "bc") == pytest.approx(0.5)
    assert similarity("  ", "bc") == 0.0


def test_bertscore_compares_normalised_texts_and_is_not_negative(libraries):
    score = BertScore(model(libraries, "roberta-large"))
    assert score("The Harbour.", "harbour") == 1.0
    assert score("Oslo", "harbour") == 0.0
    assert score("the", "harbour") == 0.0


def test_a_model_without_baseline_is_refused(libraries):
    with pytest.raises(UsageError, match="no English baseline"):
        BertScore(model(libraries, "my-bert"))


@pytest.mark.usefixtures("libraries")
def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(PrerequisiteError, match="no encoder in"):
        Similarity(str(tmp_path / "minilm"))
    with pytest.raises(PrerequisiteError, match="no such folder"):
        BertScore(tmp_path / "roberta-large")


def test_a_missing_library_names_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(encoders, "find_spec", lambda name: None)  # noqa: ARG005
    with pytest.raises(PrerequisiteError, match="pip install bert-score"):
        BertScore(tmp_path)


def test_a_text_without_a_direction_is_like_nothing():
    hashed = Similarity("hash")
    assert hashed("Oslo", "?!") == hashed("", "Oslo") == 0.0
    assert hashed("in Oslo", "Oslo in") == pytest.approx(1.0)
