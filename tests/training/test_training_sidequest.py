"""SideQuest's training: hindsight, rows, losses, resuming."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from transformers import AutoModelForCausalLM

from agentbench_kv.adapters.micro.episode import TRIGGER as MICRO_TRIGGER
from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import UsageError
from agentbench_kv.gateway.cursors import named_cursors
from agentbench_kv.methods.dropping.sidequest import TRIGGER
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run.recordings import gold_source
from agentbench_kv.run.traces import TraceCounts, trace_rows
from agentbench_kv.training.sidequest.annotation import by_rule
from agentbench_kv.training.sidequest.hindsight import cursor_uses, expired
from agentbench_kv.training.sidequest.judge import CursorVerdict, judge
from agentbench_kv.training.sidequest.rows import (
    SideQuestRow,
    count_rows,
    read_rows,
    write_rows,
)
from agentbench_kv.training.sidequest.tune import LOG, TuneOptions, Tuner, logits_at

pytest.importorskip("peft", reason='peft is not installed: pip install "agentbench-kv[train]"')

TASK = "micro/recall-1k"
MICRO = model_path("micro")
SMALL = TuneOptions(epochs=1, batch=4, lr=1e-2)


def call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": json.dumps(arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": name, "function": function}]}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": name, "content": text}


def test_a_result_is_used_as_long_as_its_words_or_its_cursor_are_named() -> None:
    messages = (
        {"role": "user", "content": "book a flight to Rome for Ada"},
        call("search", city="Rome"),
        result("search", "AZ-123 at 9:30 for Ada, AZ-777 at 11:00"),
        call("price", flight="AZ-123"),
        result("price", "costs 250 EUR, fare code QQX"),
        call("look", cursor=0),
        result("look", "nothing new for Ada"),
        call("book", flight="AZ-777"),
        result("book", "ticket 0042-17"),
        {"role": "assistant", "content": "Booked: 0042-17, code QQX."},
    )
    uses = cursor_uses(ChatSession("s", messages))
    # Answers: 1 search, 2 price, 3 look, 4 book, 5 the reply.
    assert [(use.cursor, use.brought, use.last) for use in uses] == [
        (0, 2, 4), (1, 3, 5), (2, 4, 4), (3, 5, 5)
    ]  # fmt: skip
    assert [use.call.name for use in uses if use.call] == ["search", "price", "look", "book"]
    assert [expired(uses, request) for request in range(1, 7)] == [
        set(), set(), set(), set(), {0, 2}, {0, 1, 2, 3}
    ]  # fmt: skip


def test_names_of_arguments_and_of_tools_are_no_use() -> None:
    messages = (
        {"role": "user", "content": "go"},
        call("scan", item="x1"),
        result("scan", '{"port": "bag/timu"}'),
        call("ship", port="tax/sala"),
        result("ship", "shipped at noon"),
        call("look", note="noon"),
        result("look", "nothing"),
        {"role": "assistant", "content": "Done at noon."},
    )
    # The result's own `port` is a name that the next call writes, too.
    assert [use.last for use in cursor_uses(ChatSession("s", messages))] == [2, 4, 4]
    tools = ({"type": "function", "function": {"name": "look", "description": "at noon"}},)
    assert [use.last for use in cursor_uses(ChatSession("s", messages, tools))] == [2, 3, 4]


WORDS = ("alpha", "bravo", "carol", "delta", "ab", "echo-1", "9:30", "x/y.z")


@given(st.lists(st.tuples(st.sampled_from("ur"), st.lists(st.sampled_from(WORDS), max_size=3))))
def test_last_uses_equal_their_definition(turns: list[tuple[str, list[str]]]) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "go"}]
    for kind, words in turns:
        if kind == "r":
            messages += [call("tool"), result("tool", " ".join(words))]
        else:
            messages += [
                {"role": "assistant", "content": ", ".join(words)},
                {"role": "user", "content": "on"},
            ]
    uses = {use.message: use for use in cursor_uses(ChatSession("s", tuple(messages)))}
    answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for at, message in enumerate(messages):
        if message["role"] != "tool":
            continue
        later = [n for n, answer in enumerate(answers, start=1) if answer > at]
        before = {w for m in messages[:at] for w in str(m["content"]).replace(",", "").split()}
        own = {word for word in str(message["content"]).split() if len(word) > 2} - before
        using = [
            n for n in later
            if own & set(str(messages[answers[n - 1]]["content"]).replace(",", "").split())
        ]  # fmt: skip
        assert (at in uses) == bool(later)
        if later:
            assert uses[at].last == max([later[0], *using])


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(load_tokenizer(MICRO))


@pytest.fixture(scope="module")
def rows() -> list[SideQuestRow]:
    counts = TraceCounts()
    with gold_source(TASK, "micro", 3, {}) as source:
        found = list(trace_rows(source, 2, by_rule, 0, counts))
    assert (counts.played, counts.wrong) == (3, 0)
    return found


def test_a_row_is_what_the_model_is_shown(rows: list[SideQuestRow], codec: TokenCodec) -> None:
    assert TRIGGER == MICRO_TRIGGER
    whole = {row.sample: row for row in rows if row.kind == "main"}
    asked = [row for row in rows if row.kind == "auxiliary"]
    assert len(whole) == 3
    assert any(row.expired for row in asked)
    some_left = False
    for row in asked:
        begin = row.learnt.index(True)
        assert all(row.learnt[begin:])
        answer = codec.decode(row.ids[begin:])
        assert named_cursors(answer) == row.expired
        lines = [line.split(",") for line in answer.splitlines()[1:-3]]
        assert [int(line[0]) for line in lines] == list(range(max(row.open) + 1))
        assert all(line[1:] == ["gone"] for line in lines if int(line[0]) not in row.open)
        said = {line[0]: line[2] for line in lines if len(line) == 3}
        states = {c: "done" if c in row.expired else "keep" for c in row.open}
        assert said == {str(cursor): state for cursor, state in states.items()}
        text = codec.decode(row.ids[:begin])
        assert text.endswith(f"{TRIGGER}<|im_end|>\n<|im_start|>assistant\n")
        # Every token stands where the session's log has it.
        log = whole[row.sample].ids
        history = [
            (place, token) for place, token in zip(row.positions, row.ids, strict=True)
            if place < row.positions[begin] - 12
        ]  # fmt: skip
        assert all(log[place] == token for place, token in history)
        assert row.positions == sorted(set(row.positions))
        # What had left is not there, and what is open is.
        brought = range(max(row.open) + 1)
        for cursor in brought:
            assert (f'{{"cursor": {cursor},' in text) == (cursor in row.open)
        some_left |= len(row.open) < len(brought)
    assert some_left


def test_traces_that_are_wrong_are_left_out() -> None:
    counts = TraceCounts()
    with gold_source(TASK, "micro", 2, {}) as source:

        def slip(session: str) -> list[list[int]]:
            answers = source.answers(session)
            return [answers[0], *answers[2:]] if session.endswith("0") else list(answers)

        found = list(trace_rows(replace(source, answers=slip), 4, by_rule, 0, counts))
    assert (counts.played, counts.wrong) == (2, 1)
    assert len({row.sample for row in found}) == 1


def test_rows_are_the_same_again(rows: list[SideQuestRow], tmp_path: Path) -> None:
    with gold_source(TASK, "micro", 3, {}) as source:
        again = list(trace_rows(source, 2, by_rule, 0, TraceCounts()))
    assert again == rows
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    assert read_rows(path) == rows
    path.write_text(path.read_text().replace('"main"', '"mean"', 1))
    with pytest.raises(UsageError, match="no training rows"):
        read_rows(path)


def test_a_gap_is_a_row_that_left(rows: list[SideQuestRow]) -> None:
    """Logits equal those of the whole session with a mask over what had left."""
    network = AutoModelForCausalLM.from_pretrained(MICRO, attn_implementation="eager").eval()
    row = next(r for r in rows if r.kind == "auxiliary" and r.positions[-1] >= len(r.ids))
    whole = next(r for r in rows if r.kind == "main" and r.sample == row.sample)
    ids = np.resize(whole.ids, row.positions[-1] + 1)
    ids[row.positions] = row.ids
    seen = np.zeros((len(ids), len(ids)), bool)
    seen[:, row.positions] = True
    seen &= np.tri(len(ids), dtype=bool)
    mask = torch.where(torch.from_numpy(seen), 0.0, torch.finfo(torch.float32).min)[None, None]
    with torch.no_grad():
        expected = network(
            input_ids=torch.from_numpy(ids)[None], attention_mask=mask,
            position_ids=torch.arange(len(ids))[None],
        ).logits[0]  # fmt: skip
        places = [place for place, learnt in enumerate(row.learnt) if learnt]
        found = logits_at(network, row, places)
    at = [row.positions[place] for place in places]
    assert torch.allclose(found, expected[at], atol=1e-4)


def tuner(rows: list[SideQuestRow], out: Path, options: TuneOptions = SMALL) -> Tuner:
    out.mkdir(exist_ok=True)
    return Tuner(MICRO, rows, "sha", options, out)


def trained_on(rows: list[SideQuestRow]) -> list[SideQuestRow]:
    """Rows none of whose sessions is held out."""
    names = iter(f"s{n}" for n in range(1000))
    free = (n for n in names if not SideQuestRow("main", n, [], [], []).held_out)
    known = {sample: next(free) for sample in dict.fromkeys(row.sample for row in rows)}
    return [structs.replace(row, sample=known[row.sample]) for row in rows]


def test_losses_are_those_of_the_paper(rows: list[SideQuestRow], tmp_path: Path) -> None:
    """Cross-entropy on the answer, KL of the base's distribution over the adapter's on a trace."""
    made = tuner(trained_on(rows), tmp_path)
    main = next(row for row in rows if row.kind == "main")
    asked = next(row for row in rows if row.kind == "auxiliary")
    assert made._loss(main).item() == pytest.approx(0, abs=1e-6)
    random_ = torch.Generator().manual_seed(0)
    for name, weight in made.network.named_parameters():
        if "lora_B" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=random_)
    for row in (main, asked):
        places = [at - 1 for at, learnt in enumerate(row.learnt) if learnt]
        with torch.no_grad():
            own = _log_softmax(logits_at(made.network, row, places))
            with made.network.disable_adapter():
                base = _log_softmax(logits_at(made.network, row, places))
        wanted = [row.ids[at + 1] for at in places]
        entropy = -own[np.arange(len(places)), wanted].mean()
        divergence = (np.exp(base) * (base - own)).sum(1).mean()
        expected = divergence if row.kind == "main" else entropy
        assert made._loss(row).item() == pytest.approx(expected, rel=1e-4)


def _log_softmax(logits: torch.Tensor) -> Any:
    values = logits.double().numpy()
    shifted = values - values.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def test_it_goes_on_bit_for_bit(rows: list[SideQuestRow], tmp_path: Path) -> None:
    usable = trained_on(rows)
    whole = tuner(usable, tmp_path / "whole")
    whole.run(lambda _: None, 3)
    tuner(usable, tmp_path / "cut").run(lambda _: None, 1)
    again = tuner(usable, tmp_path / "cut")
    again.resume()
    again.run(lambda _: None, 3)
    ours, theirs = (each.network.state_dict() for each in (whole, again))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    steps = [json.loads(line)["step"] for line in (tmp_path / "cut" / LOG).read_text().splitlines()]
    assert steps == [1, 2, 3]
    other = tuner(usable, tmp_path / "cut", replace(SMALL, lr=1e-3))
    with pytest.raises(UsageError, match="other data or options"):
        other.resume()


def test_answers_are_learnt_and_the_task_is_not_forgotten(
    rows: list[SideQuestRow], tmp_path: Path
) -> None:
    usable = trained_on(rows)
    made = tuner(usable, tmp_path, replace(SMALL, epochs=2, batch=2, lr=1e-2))
    found: list[Any] = []
    made.run(found.append)
    asked = [step.auxiliary for step in found if step.auxiliary is not None]
    assert len(found) == made.steps
    assert np.mean(asked[-4:]) < 0.7 * np.mean(asked[:4])
    base = [r for r in usable if r.kind == "main"]
    with torch.no_grad():
        assert max(made._loss(row).item() for row in base) < 0.1


def test_sessions_held_out_are_not_trained_on(tmp_path: Path, rows: list[SideQuestRow]) -> None:
    names = [f"n{number}" for number in range(400)]
    out = [name for name in names if SideQuestRow("main", name, [], [], []).held_out]
    assert 15 < len(out) < 75
    made = tuner([*trained_on(rows), structs.replace(rows[0], sample=out[0])], tmp_path)
    assert made.samples == sorted({row.sample for row in trained_on(rows)})
    with pytest.raises(UsageError, match="no session to train on"):
        tuner([structs.replace(row, sample=out[0]) for row in rows], tmp_path)


@given(st.lists(st.tuples(st.sets(st.integers(0, 5)), st.none() | st.sets(st.integers(0, 5)))))
def test_verdicts_are_counts(answers: list[tuple[set[int], set[int] | None]]) -> None:
    found = CursorVerdict()
    for wanted, named in answers:
        found.count(wanted, None if named is None else sorted(named))
    pairs = [(each, n) for n, (wanted, _) in enumerate(answers) for each in wanted]
    said = [(each, n) for n, (_, named) in enumerate(answers) for each in named or ()]
    both = len(set(pairs) & set(said))
    assert found.recall == (both / len(pairs) if pairs else None)
    assert found.precision == (both / len(said) if said else None)
    assert found.exact == sum(wanted == named for wanted, named in answers)
    assert found.unreadable == sum(named is None for _, named in answers)


def test_greedy_answers_are_hugging_faces(rows: list[SideQuestRow], codec: TokenCodec) -> None:
    network = AutoModelForCausalLM.from_pretrained(MICRO).eval()
    row = next(r for r in rows if r.kind == "auxiliary" and r.positions[-1] < len(r.ids))
    heard: list[str] = []

    def decode(ids: Any) -> str:
        heard.append(codec.decode(list(ids)))
        return heard[-1]

    end = int(codec.tokenizer.eos_token_id)
    assert judge(network, [row], decode, [end]).questions == 1
    given_ids = torch.tensor([row.ids[: row.learnt.index(True)]])
    out = network.generate(given_ids, do_sample=False, max_new_tokens=512, eos_token_id=end)
    said = [token for token in out[0, given_ids.shape[1] :].tolist() if token != end]
    assert heard == [codec.decode(said)]


def test_cards_count_what_is_there(rows: list[SideQuestRow]) -> None:
    card = count_rows(rows)
    assert card["main_rows"] == card["sessions"] == 3
    assert card["auxiliary_rows"] == len(rows) - 3
    assert card["expired_cursors"] == sum(len(row.expired) for row in rows)
