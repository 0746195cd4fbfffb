"""SideQuest's training: hindsight, rows, losses, resuming."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from transformers import AutoModelForCausalLM, DynamicCache

from agentbench_kv.adapters.micro.episode import TRIGGER as MICRO_TRIGGER
from agentbench_kv.adapters.micro.generate import PROFILES, generate
from agentbench_kv.adapters.probe.session import ChatSession, ToolUse
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.gateway.cursors import named_cursors
from agentbench_kv.methods.dropping.sidequest import TRIGGER
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.run import sidequest_training
from agentbench_kv.run.recordings import gold_source
from agentbench_kv.run.sidequest_training import (
    DATA_CARD,
    ROWS,
    TrainingRequest,
    _data,
    _judging,
    _made_of,
    train_sidequest,
)
from agentbench_kv.run.traces import TraceCounts, trace_rows
from agentbench_kv.training.micro.conversation import reasoned_reply
from agentbench_kv.training.sidequest.annotation import ExpiryQuestion, by_rule
from agentbench_kv.training.sidequest.hindsight import (
    CursorUse,
    awaited,
    cursor_uses,
    expired,
    told,
)
from agentbench_kv.training.sidequest.judge import CursorVerdict, _cache_name, judge
from agentbench_kv.training.sidequest.layout import lay_out
from agentbench_kv.training.sidequest.rows import (
    SideQuestFork,
    SideQuestRow,
    count_rows,
    held_out,
    read_rows,
    rows_sha,
    write_rows,
)
from agentbench_kv.training.sidequest.save import losses
from agentbench_kv.training.sidequest.tune import CHECKPOINT, LOG, TuneOptions, Tuner, logits_at

pytest.importorskip("peft", reason='peft is not installed: pip install "agentbench-kv[train]"')

TASK = "micro/recall-1k"
MICRO = model_path("micro")
SMALL = TuneOptions(epochs=1, batch=1, lr=1e-2)


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
    assert [use.uses for use in uses] == [(2, 3, 4), (5,), (), (5,)]
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


def used(cursor: int, tool: str, brought: int, *answers: int) -> CursorUse:
    """Make a result of a tool that answers use."""
    return CursorUse(cursor, 1, brought, answers, ToolUse(tool, {}, message=0, result=1))


def test_what_is_mostly_used_later_cannot_be_told_to_be_expired() -> None:
    # A key is used again and again, a parcel once if at all, a receipt never.
    usual = [used(0, "key", 1, 3, 5), used(1, "parcel", 2, 5), used(2, "receipt", 4)]
    never = [used(0, "key", 1, 3, 6, 7), used(1, "parcel", 2), used(2, "receipt", 3)]
    habits = awaited([usual, usual, never])
    assert habits == {("key", False), ("key", True), ("parcel", False)}
    assert [told(usual, request, habits) for request in range(1, 8)] == [
        set(), set(), set(), set(), {2}, {1, 2}, {1, 2}
    ]  # fmt: skip
    # What nobody can know by then is not told: not the last use of the key, nor the parcel's fate.
    assert (expired(never, 8), told(never, 8, habits)) == ({0, 1, 2}, {2})
    assert told(never, 8, frozenset()) == {0, 1, 2}
    assert awaited([]) == frozenset()


def test_reasoning_by_rule_is_what_the_answer_follows_from() -> None:
    results = ('{"cursor": 0, "port": "bag/timu", "log": "x"}', "hat 3.5 is", "!")
    messages = [{"role": "user", "content": "go"}]
    for number, text in enumerate(results):
        messages += [call(f"t{number}", at=number), result(f"t{number}", text)]
    messages += [{"role": "assistant", "content": "done"}]
    session = ChatSession("s", tuple(messages))
    uses = [CursorUse(cursor, 2 * cursor + 2, cursor + 2, (), None) for cursor in range(3)]

    def lines(shown: str, told: tuple[int, ...], *gone: int) -> list[str]:
        found = tuple(use for use in uses if use.cursor not in gone)
        return by_rule(ExpiryQuestion(session, 4, found, told, shown)).splitlines()

    assert lines("", ()) == ['0, "port": "bag,keep', "1] hat,keep", "2,result,keep"]
    # Of what begins alike the newest is named.
    text = '{"port": "bag/timu", "log": "baggy"}\nhat 3.5 <p>bag+saka</p> hat-1.'
    assert lines(text, (0, 2)) == [
        '0, "port": "bag+saka,done [0]', "1] hat-1,keep", "2,result,done [0, 2]"
    ]  # fmt: skip
    assert lines(text, (2,), 0, 1) == ["0,-", "1,-", "2,result,done [2]"]
    assert lines(text, (), 2) == ['0, "port": "bag+saka,keep', "1] hat-1,keep"]
    assert by_rule(ExpiryQuestion(session, 4, (), ())) == ""


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(load_tokenizer(MICRO))


@pytest.fixture(scope="module")
def rows() -> list[SideQuestRow]:
    counts = TraceCounts()
    with gold_source(TASK, "micro", 4, {}) as source:
        found = list(trace_rows([source], 2, by_rule, 0, counts))
    assert (counts.played, counts.wrong) == (4, 0)
    return found


def forks(rows: list[SideQuestRow]) -> list[tuple[SideQuestRow, SideQuestFork]]:
    return [(row, fork) for row in rows for fork in row.forks]


def asked(row: SideQuestRow, fork: SideQuestFork) -> Any:
    """Lay out a question without its answer."""
    return lay_out(row, [structs.replace(fork, ids=fork.ids[: fork.answer])], fork.at)


def test_a_fork_is_what_the_model_is_shown(rows: list[SideQuestRow], codec: TokenCodec) -> None:
    assert TRIGGER == MICRO_TRIGGER
    assert any(fork.told for _, fork in forks(rows))
    some_left = False
    for row, fork in forks(rows):
        answer = codec.decode(fork.ids[fork.answer :])
        assert named_cursors(answer) == fork.told
        assert set(fork.told) <= set(fork.expired) <= set(fork.open)
        lines = [line.split(",", 2) for line in answer.splitlines()[1:-3]]
        assert [int(line[0]) for line in lines] == list(range(max(fork.open) + 1))
        assert all(line[1:] == ["-"] for line in lines if int(line[0]) not in fork.open)
        said = {int(line[0]): line[2].split()[0] for line in lines if len(line) == 3}
        assert said == {c: "done" if c in fork.told else "keep" for c in fork.open}
        shown = asked(row, fork)
        seen = [token for token, is_seen in zip(shown.ids, shown.seen[-1], strict=True) if is_seen]
        text = codec.decode(seen)
        assert text.endswith(f"{TRIGGER}<|im_end|>\n<|im_start|>assistant\n")
        # What had left is not seen, and what is open is.
        brought = range(max(fork.open) + 1)
        for cursor in brought:
            assert (f'{{"cursor": {cursor},' in text) == (cursor in fork.open)
        some_left |= len(fork.open) < len(brought)
    assert some_left


def test_the_micro_models_memory_turns_are_those(
    rows: list[SideQuestRow], codec: TokenCodec
) -> None:
    for row, fork in forks(rows):
        episode = generate(int(row.sample.rpartition("-")[2]), PROFILES["recall-1k"])
        results = [call.result_json(at) for at, call in enumerate(episode.calls)]
        shown = asked(row, fork)
        seen = [token for token, is_seen in zip(shown.ids, shown.seen[-1], strict=True) if is_seen]
        opened = {cursor: results[cursor] for cursor in fork.open}
        said = reasoned_reply(opened, fork.told, codec.decode(seen))
        assert codec.decode(fork.ids[fork.answer :]) == f"{said}<|im_end|>"


def test_traces_that_are_wrong_are_left_out() -> None:
    counts = TraceCounts()
    with gold_source(TASK, "micro", 2, {}) as source:

        def slip(session: str) -> list[list[int]]:
            answers = source.answers(session)
            return [answers[0], *answers[2:]] if session.endswith("0") else list(answers)

        found = list(trace_rows([replace(source, answers=slip)], 4, by_rule, 0, counts))
    assert (counts.played, counts.wrong) == (2, 1)
    assert len({row.sample for row in found}) == 1


def test_of_traces_that_are_the_same_one_is_kept(rows: list[SideQuestRow]) -> None:
    counts = TraceCounts()
    with gold_source(TASK, "micro", 2, {}) as short, gold_source(TASK, "micro", 4, {}) as long:

        def chatty(session: str) -> list[list[int]]:
            return [*map(list, long.answers(session)), [5]]

        other = replace(long, answers=chatty, samples=long.samples[:1])  # as of another run
        found = list(trace_rows([short, long, short, other, other], 2, by_rule, 0, counts))
    assert (counts.played, counts.wrong, counts.repeated) == (5, 0, 5)
    assert found[:4] == rows
    assert found[4].sample == rows[0].sample


def test_a_held_out_sample_judges_once(rows: list[SideQuestRow]) -> None:
    names = [name for name in (f"n{n}" for n in range(400)) if held_out(name)][:3]
    one, two, three = (structs.replace(rows[0], sample=name) for name in names)
    again, elsewhere = structs.replace(one, ids=one.ids[:9]), structs.replace(one, task="other")
    assert _judging([one, *trained_on(rows), two, again, one, elsewhere, three]) == [
        one, two, elsewhere, three
    ]  # fmt: skip


def test_questions_of_one_session_are_on_one_side(rows: list[SideQuestRow]) -> None:
    """A probe's samples of a session are called by their questions: some were trained on."""
    names = [f"n{number}" for number in range(400)]
    marks = ("", "@0123abcd", "@89abcdef")
    sides = {name: {held_out(f"{name}{mark}") for mark in marks} for name in names}
    assert {len(found) for found in sides.values()} == {1}
    assert 15 < sum(found == {True} for found in sides.values()) < 75
    assert held_out("n2@other") is not held_out("n2")  # no mark of questions
    out = next(name for name in names if held_out(name))
    first, second = (structs.replace(rows[0], sample=f"{out}{mark}") for mark in marks[1:])
    assert _judging([first, second]) == [first]


def test_rows_are_the_same_again(rows: list[SideQuestRow], tmp_path: Path) -> None:
    with gold_source(TASK, "micro", 4, {}) as source:
        again = list(trace_rows([source], 2, by_rule, 0, TraceCounts()))
    assert again == rows
    path = tmp_path / "rows.jsonl"
    write_rows(path, rows)
    assert read_rows(path) == rows
    path.write_text(path.read_text().replace('"left"', '"right"', 1))
    with pytest.raises(UsageError, match="no training rows"):
        read_rows(path)
    write_rows(path, [structs.replace(rows[0], ids=rows[0].ids[1:])])
    with pytest.raises(UsageError, match="unequal lengths"):
        read_rows(path)


def test_one_pass_is_what_a_cache_would_hold(rows: list[SideQuestRow]) -> None:
    """Logits equal those of a cache that is fed, forked, and loses rows, a message at a time."""
    network = AutoModelForCausalLM.from_pretrained(MICRO, attn_implementation="eager").eval()
    row = next(r for r in rows if any(f.at >= since for _, _, since in r.left for f in r.forks))
    fork = row.forks[-1]
    layout = lay_out(row, row.forks, len(row.ids))
    begin = len(layout.ids) - len(fork.ids)
    with torch.no_grad():
        found = logits_at(network, layout, list(range(begin, len(layout.ids))))
        own = logits_at(network, layout, list(range(len(row.ids))))
        cache = DynamicCache(config=network.config)
        held: list[int] = []
        cuts = sorted({0, fork.at, *(since for _, _, since in row.left if since < fork.at)})
        for first, last in pairwise(cuts):
            gone = {at for b, e, since in row.left if since == first for at in range(b, e)}
            kept = [place for place, at in enumerate(held) if at not in gone]
            for layer in cache.layers if held else ():
                layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
            held = [held[place] for place in kept]
            fed = _feed(network, cache, row.ids[first:last], first, len(held))
            assert torch.allclose(fed, own[first:last], atol=1e-3)
            held += range(first, last)
        gone = {at for b, e, since in row.left if since == fork.at for at in range(b, e)}
        kept = [place for place, at in enumerate(held) if at not in gone]
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
        expected = _feed(network, cache, fork.ids, fork.at, len(kept))
    assert len(kept) < fork.at
    assert torch.allclose(found, expected, atol=1e-3)


def _feed(network: Any, cache: Any, ids: list[int], position: int, held: int) -> torch.Tensor:
    mask = torch.full((len(ids), held + len(ids)), torch.finfo(torch.float32).min)
    mask = mask.triu(held + 1)
    positions = torch.arange(position, position + len(ids))[None]
    name = _cache_name(network)
    out = network(
        input_ids=torch.tensor([ids]), attention_mask=mask[None, None], position_ids=positions,
        use_cache=True, **{name: cache},
    )  # fmt: skip
    found: torch.Tensor = out.logits[0]
    return found


def tuner(rows: list[SideQuestRow], out: Path, options: TuneOptions = SMALL) -> Tuner:
    out.mkdir(exist_ok=True)
    return Tuner(MICRO, rows, "sha", options, out)


def trained_on(rows: list[SideQuestRow]) -> list[SideQuestRow]:
    """Rows none of whose sessions is held out."""
    names = iter(f"s{n}" for n in range(1000))
    free = (n for n in names if not held_out(n))
    return [structs.replace(row, sample=next(free)) for row in rows]


def test_losses_are_those_of_the_paper(rows: list[SideQuestRow], tmp_path: Path) -> None:
    """Cross-entropy on answers, KL of the base's distribution with all there over the adapter's."""
    made = tuner(trained_on(rows), tmp_path)
    row = next(r for r in rows if r.left)
    assert made._losses(structs.replace(row, left=[]))[1].item() == pytest.approx(0, abs=1e-6)
    assert made._losses(structs.replace(row, forks=[]))[0] is None
    random_ = torch.Generator().manual_seed(0)
    for name, weight in made.network.named_parameters():
        if "lora_B" in name:
            weight.data = 0.3 * torch.randn(weight.shape, generator=random_)
    places = [at - 1 for at, answered in enumerate(row.answered) if answered]
    with torch.no_grad():
        own = _log_softmax(logits_at(made.network, lay_out(row, [], len(row.ids)), places))
        whole = lay_out(structs.replace(row, left=[]), [], len(row.ids))
        with made.network.disable_adapter():
            base = _log_softmax(logits_at(made.network, whole, places))
        entropies: list[float] = []
        for fork in row.forks:
            layout = lay_out(row, [fork], fork.at)
            said = list(range(fork.at + fork.answer - 1, len(layout.ids) - 1))
            found = _log_softmax(logits_at(made.network, layout, said))
            entropies += (-found[np.arange(len(said)), fork.ids[fork.answer :]]).tolist()
    divergence = (np.exp(base) * (base - own)).sum(1).mean()
    answers, distill = made._losses(row)
    assert answers is not None
    assert answers.item() == pytest.approx(np.mean(entropies), rel=1e-4)
    assert distill.item() == pytest.approx(divergence, rel=1e-4)


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
    checkpoint = tmp_path / "cut" / CHECKPOINT
    checkpoint.write_bytes(checkpoint.read_bytes()[:5000])
    with pytest.raises(UsageError, match=r"checkpoint\.pt is damaged; remove it"):
        again.resume()


def test_a_torn_line_of_the_log_is_passed_over(rows: list[SideQuestRow], tmp_path: Path) -> None:
    usable = trained_on(rows)
    made = tuner(usable, tmp_path)
    made.run(lambda _: None, 1)
    with (tmp_path / LOG).open("a") as log:
        log.write('{"step": 2, "ste')
    made.run(lambda _: None, 2)
    assert [report["step"] for report in losses(tmp_path)] == [1, 2]


def request_of(folder: Path, **changes: Any) -> TrainingRequest:
    return replace(TrainingRequest(str(folder), gold=TASK, limit=1), **changes)


def test_rows_are_of_one_model_and_one_syntax(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, out = tmp_path / "base", tmp_path / "out"
    shutil.copytree(MICRO, base)
    monkeypatch.setattr(sidequest_training, "trace_rows", lambda *_: iter(()))
    asked = request_of(base)
    out.mkdir()
    write_rows(out / ROWS, [])
    card = {"made_of": _made_of(asked), "sha": rows_sha(out / ROWS)}

    def kept(asked: TrainingRequest, **card: Any) -> list[SideQuestRow]:
        (out / DATA_CARD).write_text(json.dumps(card))
        return _data(asked, out, lambda _: None)[0]

    assert kept(asked, **card) == []
    with pytest.raises(UsageError, match="holds rows of another model"):
        kept(replace(asked, tool_syntax="json"), **card)
    with (base / "config.json").open("a") as config:
        config.write("\n")
    with pytest.raises(UsageError, match="holds rows of another model"):
        kept(asked, **card)
    # A folder from before these were kept is gone on from.
    late = ("model_sha", "tool_syntax", "trials")
    old = {n: v for n, v in card["made_of"].items() if n not in late}
    assert kept(asked, made_of=old, sha=card["sha"]) == []
    (out / DATA_CARD).write_text(json.dumps(card)[:-30])
    with pytest.raises(UsageError, match=r"data\.json is damaged; remove it"):
        _data(asked, out, lambda _: None)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dtype": "foo"}, "dtype 'foo'"),
        ({"device": "foo"}, "device 'foo' is none"),
        ({"device": "cuda"}, "torch sees no GPU"),
    ],
)
def test_what_no_machine_has_is_refused_first(
    settings: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    asked = request_of(MICRO, options=TuneOptions(**settings))
    with pytest.raises((UsageError, PrerequisiteError), match=said):
        train_sidequest(asked, tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_answers_are_learnt_and_the_task_is_not_forgotten(
    rows: list[SideQuestRow], tmp_path: Path
) -> None:
    usable = trained_on(rows)
    made = tuner(usable, tmp_path, replace(SMALL, epochs=6))
    found: list[Any] = []
    made.run(found.append)
    asked = [step.auxiliary for step in found if step.auxiliary is not None]
    assert len(found) == made.steps
    assert np.mean(asked[-4:]) < 0.8 * np.mean(asked[:4])  # 0.71
    with torch.no_grad():
        assert max(made._losses(row)[1].item() for row in usable) < 0.1


def test_a_step_keeps_no_layers_activations(rows: list[SideQuestRow], tmp_path: Path) -> None:
    """Layers compute them again; gradients are the same."""
    made = tuner(trained_on(rows), tmp_path)
    row = made._rows[0]
    found: list[tuple[int, dict[str, torch.Tensor]]] = []
    for spared in (True, False):
        if not spared:
            for module in made.network.modules():
                if getattr(module, "gradient_checkpointing", False):
                    module.gradient_checkpointing = False
        made.network.train()
        kept: dict[int, int] = {}

        def keep(tensor: torch.Tensor, kept: dict[int, int] = kept) -> torch.Tensor:
            if not isinstance(tensor, torch.nn.Parameter):
                kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            asked, own = made._losses(row)
        assert asked is not None
        (asked + own).backward()
        named = {
            n: p.grad.clone() for n, p in made.network.named_parameters() if p.grad is not None
        }
        made._optimizer.zero_grad()
        found.append((sum(kept.values()), named))
    (less, one), (more, other) = found
    assert less < more / 3
    assert one.keys() == other.keys()
    assert all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def test_sessions_held_out_are_not_trained_on(tmp_path: Path, rows: list[SideQuestRow]) -> None:
    names = [f"n{number}" for number in range(400)]
    out = [name for name in names if held_out(name)]
    assert 15 < len(out) < 75
    made = tuner([*trained_on(rows), structs.replace(rows[0], sample=out[0])], tmp_path)
    assert made.samples == {rows[0].task: sorted({row.sample for row in trained_on(rows)})}
    assert rows[0].task == "micro/recall-1k"
    with pytest.raises(UsageError, match="no session to train on"):
        tuner([structs.replace(row, sample=out[0]) for row in rows], tmp_path)


CURSORS = st.sets(st.integers(0, 5))


@given(st.lists(st.tuples(CURSORS, CURSORS, st.none() | CURSORS)))
def test_verdicts_are_counts(answers: list[tuple[set[int], set[int], set[int] | None]]) -> None:
    found = CursorVerdict()
    for over, can, named in answers:
        fork = SideQuestFork(0, [0, 0], 1, list(range(6)), sorted(over), sorted(can & over))
        found.count(fork, None if named is None else sorted(named))
    pairs = [(each, n) for n, (over, _, _) in enumerate(answers) for each in over]
    can_be = [(each, n) for n, (over, can, _) in enumerate(answers) for each in over & can]
    said = [(each, n) for n, (_, _, named) in enumerate(answers) for each in named or ()]
    for truth, recall in ((pairs, found.recall), (can_be, found.told_recall)):
        assert recall == (len(set(truth) & set(said)) / len(truth) if truth else None)
    assert found.precision == (len(set(pairs) & set(said)) / len(said) if said else None)
    assert found.exact == sum(over & can == named for over, can, named in answers)
    assert found.unreadable == sum(named is None for _, _, named in answers)


def test_greedy_answers_are_hugging_faces(rows: list[SideQuestRow], codec: TokenCodec) -> None:
    network = AutoModelForCausalLM.from_pretrained(MICRO).eval()
    row, fork = next((r, f) for r, f in forks(rows) if not any(s <= f.at for _, _, s in r.left))
    heard: list[str] = []

    def decode(ids: Any) -> str:
        heard.append(codec.decode(list(ids)))
        return heard[-1]

    end = int(codec.tokenizer.eos_token_id)
    assert judge(network, [structs.replace(row, forks=[fork])], decode, [end]).questions == 1
    given_ids = torch.tensor([[*row.ids[: fork.at], *fork.ids[: fork.answer]]])
    out = network.generate(given_ids, do_sample=False, max_new_tokens=512, eos_token_id=end)
    said = [token for token in out[0, given_ids.shape[1] :].tolist() if token != end]
    assert heard == [codec.decode(said)]


def test_a_token_more_sees_what_the_last_one_does(rows: list[SideQuestRow]) -> None:
    row, fork = next((r, f) for r, f in forks(rows) if any(s <= f.at for _, _, s in r.left))
    grown = asked(row, fork)
    for token in fork.ids[fork.answer :]:
        grown = grown.then(token)
    whole = lay_out(row, [fork], fork.at)
    assert (grown.ids, grown.positions) == (whole.ids, whole.positions)
    assert grown.seen.equal(whole.seen)


def test_cards_count_what_is_there(rows: list[SideQuestRow]) -> None:
    card = count_rows(rows)
    assert card["sessions"] == len(rows) == 4
    assert card["questions"] == len(forks(rows))
    assert card["expired_cursors"] == sum(len(fork.expired) for _, fork in forks(rows))
    assert card["told_cursors"] == sum(len(fork.told) for _, fork in forks(rows))
    assert card["longest_row"] < card["tokens"] == sum(row.tokens for row in rows)
