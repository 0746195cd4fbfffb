import json
from dataclasses import replace

import pytest

from agentbench_kv.adapters.micro.episode import auxiliary_reply, cursors
from agentbench_kv.adapters.micro.generate import (
    CURRICULUM,
    HANDLE,
    LONG_CURRICULUM,
    NAMES,
    PARAMETERS,
    PROFILES,
    STEPS,
    SYLLABLES,
    generate,
    held_out_seed,
    train_seed,
)
from agentbench_kv.adapters.micro.task import Recall1k, Recall5k

ALL = (*PROFILES.values(), *CURRICULUM, *LONG_CURRICULUM)


def messages(episode):
    for turn in episode.turns:
        yield from turn.calls
        yield turn.reply


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_equal_seeds_give_equal_episodes(profile):
    assert generate(7, profile) == generate(7, profile)
    assert generate(7, profile) != generate(8, profile)


def test_seed_ranges_do_not_meet():
    assert held_out_seed(2**40) < train_seed(0)
    assert len({held_out_seed(index) for index in range(1000)}) == 1000


@pytest.mark.parametrize("profile", ALL, ids=lambda profile: profile.name)
def test_slots_list_the_handles_of_each_message_in_order(profile):
    for seed in range(20):
        for message in messages(generate(seed, profile)):
            found = [match.group() for match in HANDLE.finditer(message.raw)]
            assert found == [slot.handle for slot in message.slots]


@pytest.mark.parametrize("name", PROFILES)
def test_every_phase_is_needed_both_ways(name):
    for seed in range(20):
        slots = [
            slot for message in messages(generate(seed, PROFILES[name])) for slot in message.slots
        ]
        for kind in ("recurring", "one_shot"):
            sources = {slot.source for slot in slots if slot.kind == kind}
            assert sources == {"think", "act", "tool", "others"}


@pytest.mark.parametrize("name", PROFILES)
def test_recalled_facts_were_stated_before_and_unambiguously(name):
    for seed in range(20):
        episode = generate(seed, PROFILES[name])
        stated = {}
        texts = [(episode.system, None)]
        for turn in episode.turns:
            texts.append((turn.text, None))
            for call in turn.calls:
                texts += [(call.raw, call), (call.result_json(0), None)]
            texts.append((turn.reply.raw, turn.reply))
        for text, message in texts:
            for slot in message.slots if message else ():
                if slot.kind in ("recurring", "one_shot"):
                    key = slot.handle[: -len("timu")]
                    assert stated[key] == {slot.handle}
            for match in HANDLE.finditer(text):
                stated.setdefault(match[1] + match[2], set()).add(match.group())


def test_steps_change_what_is_said_and_no_fact():
    """The same seed without steps: the same slots, results and cores of messages."""
    profile = PROFILES["recall-4k-long"]
    for seed in range(20):
        long, short = (generate(seed, p) for p in (profile, replace(profile, steps=(0, 0))))
        assert long.system == short.system
        for spoken, plain in zip(messages(long), messages(short), strict=True):
            assert spoken.slots == plain.slots
        for turn, brief in zip(long.turns, short.turns, strict=True):
            request, _, steps = turn.text.rpartition("\nSteps: ")
            assert request == brief.text
            assert turn.reply.text.startswith(brief.reply.text + " ")
            for call, plain in zip(turn.calls, brief.calls, strict=True):
                assert call.result == plain.result
                assert call.think.endswith("\n" + plain.think)
                assert {**call.arguments, **plain.arguments} == call.arguments
                subject = turn.subject or "it"
                said = [STEPS[step][1].format(subject) for step in steps.split(", ")]
                assert call.arguments["note"] == " ".join(said)


def test_sessions_of_the_first_tasks_are_those_ever_published():
    """Published figures refer to these samples: a changed grammar needs another name."""
    shas = {
        task: task.create({}).provenance()["episodes_sha"][:16] for task in (Recall1k, Recall5k)
    }
    assert shas == {Recall1k: "1e1771a613ca52d1", Recall5k: "2553a3f58dec4dca"}


def test_one_shot_facts_are_asked_for_once():
    for seed in range(20):
        episode = generate(seed, PROFILES["recall-5k"])
        asked = [
            slot.handle
            for message in messages(episode)
            for slot in message.slots
            if slot.kind == "one_shot" and not slot.copied
        ]
        assert len(asked) == len(set(asked))


def test_arguments_follow_the_schemas():
    episode = generate(3, PROFILES["recall-5k"])
    schemas = {tool["function"]["name"]: tool["function"]["parameters"] for tool in episode.tools}
    for call in episode.calls:
        assert list(schemas[call.name]["properties"]) == list(call.arguments)
        assert tuple(call.arguments) == PARAMETERS[call.name]
        assert json.loads(call.result_json(4))["cursor"] == 4


def test_vocabulary_is_what_the_notes_say():
    assert len(SYLLABLES) == 64
    assert len(set(NAMES)) == len(NAMES)
    assert all(name[:2] in SYLLABLES for name in NAMES)


def test_cursors_of_finished_items_are_stale():
    episode = generate(5, PROFILES["recall-5k"])
    listed = cursors(episode, len(episode.turns))
    shipped = {turn.subject for turn in episode.turns if turn.calls[0].name == "open"}
    for cursor, call in zip(listed, episode.calls, strict=True):
        needed = call.name == "login" or (call.name == "scan" and cursor.subject not in shipped)
        assert cursor.stale is not needed


def test_auxiliary_reply_names_the_stale_cursors():
    listed = cursors(generate(5, PROFILES["recall-1k"]), 4)
    answer = auxiliary_reply(listed).split("</think>\n\n")[1]
    assert json.loads(answer)["del_cursors"] == [entry.number for entry in listed if entry.stale]
