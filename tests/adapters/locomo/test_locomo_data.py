"""Reading the file: what is kept, what is mended, and what is refused in one line."""

import pytest

from agentbench_kv.adapters.locomo.data import CATEGORIES, FILE, load
from agentbench_kv.errors import PrerequisiteError


def one(folder):  # noqa: ARG001
    return load(check=False).conversations["talk-1"]


def test_sessions_come_by_number_and_dates_without_one_are_left_out(folder):
    talk = one(folder)
    assert [each.date for each in talk.sessions] == [
        f"1:56 pm on {day} May, 2023" for day in (1, 2, 10)
    ]
    assert [each.id for each in talk.sessions[2].utterances] == ["D10:1", "D10:2"]
    assert talk.sessions[0].utterances[0].caption == "a grey harbour"
    assert talk.sessions[0].utterances[1].caption is None


def test_adversarial_questions_are_left_out_and_answers_are_text(folder):
    questions = one(folder).questions
    assert [each.index for each in questions] == [0, 2, 3, 4, 5]
    assert {each.category for each in questions} == set(CATEGORIES)
    assert questions[2].answer == "1"


def test_references_are_mended_and_unknown_ones_dropped(folder):
    by_index = {each.index: each for each in one(folder).questions}
    assert by_index[3].evidence == ("D1:2",)
    assert by_index[4].evidence == ("D2:1", "D1:1")
    assert by_index[5].evidence == ()


def test_a_missing_file_names_the_variable_and_the_source(tmp_path, monkeypatch):
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    with pytest.raises(PrerequisiteError, match="snap-research") as caught:
        load()
    message = str(caught.value)
    assert FILE in message
    assert "KVBENCH_DATA" in message
    assert "\n" not in message


def test_another_file_is_refused_by_its_hash(folder):  # noqa: ARG001
    with pytest.raises(PrerequisiteError, match=r"not the published file.*79fa87e9"):
        load()


@pytest.mark.parametrize(
    "text", ["{", '{"a": 1}', "[1]", '[{"qa": []}]', '[{"sample_id": "a", "qa": 3}]', "[]"]
)
def test_a_file_of_another_form_is_one_line(folder, text):
    (folder / FILE).write_text(text)
    with pytest.raises(PrerequisiteError) as caught:
        load(check=False)
    assert "\n" not in str(caught.value)


def test_the_published_file_has_1540_questions_in_10_conversations(published):
    assert len(published.conversations) == 10
    assert sum(len(each.questions) for each in published.conversations.values()) == 1540
    counts = dict.fromkeys(CATEGORIES, 0)
    for talk in published.conversations.values():
        for question in talk.questions:
            counts[question.category] += 1
    assert counts == {1: 282, 2: 321, 3: 96, 4: 841}
