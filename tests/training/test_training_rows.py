import json
import random

import numpy as np
import pytest
import torch

from agentbench_kv.adapters.micro.episode import cursors
from agentbench_kv.adapters.micro.generate import PROFILES, generate, held_out_seed, train_seed
from agentbench_kv.training.micro import data
from agentbench_kv.training.micro.conversation import (
    EVIDENCE,
    LABELS,
    MEMORY,
    PROMPT,
    TEMPLATE,
    auxiliary,
    reasoned_reply,
)
from agentbench_kv.training.micro.evaluate import gaps
from agentbench_kv.training.micro.memory_drill import memory_drill
from agentbench_kv.training.micro.tokenizer import build_tokenizer
from agentbench_kv.training.micro.train import MEMORY_RECIPE, RECIPE

SMALL, LARGE = PROFILES["recall-1k"], PROFILES["recall-5k"]


@pytest.fixture(scope="module")
def encoder():
    return data.RowEncoder(build_tokenizer())


@pytest.fixture(scope="module")
def small_rows(encoder):
    return [data.episode_row(encoder, held_out_seed(index), SMALL) for index in range(20)]


def test_no_held_out_episode_is_trained_on(encoder, monkeypatch):
    seeds = []

    def noting(make):
        return lambda seed, *sizes: seeds.append(seed) or make(seed, *sizes)

    monkeypatch.setattr(data, "generate", noting(data.generate))
    monkeypatch.setattr(data, "drill", noting(data.drill))
    monkeypatch.setattr(data, "memory_drill", noting(data.memory_drill))
    for stage in (*RECIPE, *MEMORY_RECIPE):
        for step, mix in enumerate(stage.mixes):
            data.batch(encoder, mix, 0, step)
    assert min(seeds) >= train_seed(0) > held_out_seed(-1)


def test_rows_are_a_function_of_seed_and_step(encoder):
    mix = RECIPE[2].mixes[0]
    one, same, other = (data.batch(encoder, mix, 0, step) for step in (3, 3, 4))
    assert torch.equal(one.ids, same.ids)
    assert torch.equal(one.positions, same.positions)
    assert not torch.equal(one.ids, other.ids)


def test_every_label_of_evidence_occurs_and_codes_are_pairs(small_rows):
    for label in EVIDENCE:
        count = sum(int((row.labels == label).sum()) for row in small_rows)
        assert count % 2 == 0
        if LABELS[label] != "tool/local" or count:
            assert count > 0


def test_the_agent_says_about_a_third(encoder, small_rows):
    share = np.mean([np.mean(row.labels >= TEMPLATE) for row in small_rows])
    assert 0.33 <= share <= 0.42
    large = [data.episode_row(encoder, held_out_seed(index), LARGE) for index in range(6)]
    assert 0.24 <= np.mean([np.mean(row.labels >= TEMPLATE) for row in large]) <= 0.32
    assert 4400 <= np.median([len(row.ids) for row in large]) <= 5600


@pytest.mark.parametrize("profile", [SMALL, LARGE], ids=lambda it: it.name)
def test_no_burst_of_prompt_exceeds_the_first(encoder, profile):
    """Evictions are 128 spoken tokens apart; what arrives in between must stay below the peak."""
    for index in range(10):
        row = data.episode_row(encoder, held_out_seed(index), profile)
        spoken = row.labels >= TEMPLATE
        first = int(np.flatnonzero(spoken)[0])
        marks = np.flatnonzero(spoken)[::128]
        for start, end in zip(marks, [*marks[1:], len(spoken)], strict=True):
            assert int((~spoken[start:end]).sum()) < first


def test_a_memory_drill_names_what_a_later_slip_ends(encoder):
    ends = set()
    for seed in range(60):
        told = memory_drill(seed)
        shown, _, answer = told.text.partition("** Memory management mode **")
        lines = shown.replace("<|im_end|>", "").splitlines()
        results = [json.loads(line) for line in lines if line.startswith("{")]
        assert [each["cursor"] for each in results] == list(range(len(results)))
        slips = {each["slip"].partition("+")[0] for each in results if "slip" in each}
        over = [
            each["cursor"]
            for each in results
            if "session" not in each and each.get("port", "").partition("/")[0] in {"", *slips}
        ]
        named = json.loads(answer[answer.index("{") : answer.index("}") + 1])["del_cursors"]
        assert named == over
        assert answer.count(",done") == len(over)
        assert answer.count(",keep") == len(results) - len(over)
        row = encoder.row(told)
        asked = encoder._core.decode(
            row.ids[row.labels == MEMORY].tolist(), skip_special_tokens=False
        )
        assert asked == answer[answer.index("<think>") :].rstrip("\n")
        assert set(row.labels) == {PROMPT, MEMORY}
        ends |= {each["port"].partition("/")[0] in slips for each in results if "port" in each}
    assert ends == {True, False}


def test_an_answer_names_nothing_that_has_left(encoder):
    """The newest mention of a name is one that the row still holds."""
    differ = 0
    for seed in range(12):
        episode = generate(held_out_seed(seed), SMALL)
        turns, calls = len(episode.turns), episode.calls
        gone = {max(n for n, call in enumerate(calls) if call.name == "open")}
        told = auxiliary(episode, turns, gone, reasoned=True)
        row = encoder.row(told, frozenset(gone))
        shown = encoder._core.decode(row.ids[row.labels != MEMORY].tolist(), False)
        texts = {n: call.result_json(n) for n, call in enumerate(calls) if n not in gone}
        stale = [c.number for c in cursors(episode, turns) if c.stale and c.number not in gone]
        answer = encoder._core.decode(row.ids[row.labels == MEMORY].tolist(), False)
        assert answer == reasoned_reply(texts, stale, shown) + "<|im_end|>"
        whole = told.text.rpartition("<think>")[0]
        differ += reasoned_reply(texts, stale, whole) != reasoned_reply(texts, stale, shown)
    assert differ


def test_facts_lie_far_back(small_rows, encoder):
    small = gaps(small_rows)
    for name, (_, median, _) in small.items():
        if name.endswith(("recurring", "one_shot")):
            assert median > 64, name
    large = gaps([data.episode_row(encoder, held_out_seed(index), LARGE) for index in range(6)])
    for source in ("think", "act", "tool", "others"):
        assert large[f"{source}/one_shot"][1] > 800


def test_evicted_calls_leave_gaps_in_positions(encoder):
    for index in range(20):
        row = data.auxiliary_row(encoder, held_out_seed(index), SMALL)
        assert set(np.unique(row.labels)) <= {PROMPT, MEMORY}
        assert (np.diff(row.positions) >= 1).all()
    holes = [
        data.auxiliary_row(encoder, held_out_seed(index), SMALL).positions for index in range(20)
    ]
    assert any((np.diff(positions) > 1).any() for positions in holes)


def test_leaps_keep_the_order_and_the_limit(encoder, small_rows):
    row = data._with_gaps(encoder, small_rows[0], random.Random(1))
    assert (np.diff(row.positions) >= 1).all()
    assert row.positions[-1] < data.FARTHEST
