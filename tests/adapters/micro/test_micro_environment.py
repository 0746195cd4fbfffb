import json

import pytest

from agentbench_kv.adapters.micro.episode import Environment
from agentbench_kv.adapters.micro.generate import PROFILES, generate
from agentbench_kv.adapters.micro.task import Recall1k, Recall5k, score


def play(episode, alter=lambda call: (call.name, call.arguments)):
    """Act as the gold agent, its calls altered."""
    environment = Environment(episode)
    for turn in episode.turns:
        assert environment.request == turn.text
        for call in turn.calls:
            if environment.call(*alter(call)).turn_over:
                break
        else:
            environment.reply(turn.reply.text)
    return environment


@pytest.mark.parametrize("name", PROFILES)
def test_gold_agent_succeeds(name):
    for seed in range(10):
        result = score(play(generate(seed, PROFILES[name])))
        assert result.success
        assert {"think", "act", "tool", "others"} <= set(result.tallies)
        assert all(right == asked > 0 for right, asked in result.tallies.values())


@pytest.mark.parametrize("task", [Recall1k(), Recall5k()], ids=lambda task: task.profile)
def test_a_trial_that_fails_was_asked_as_much_as_any_other(task):
    for sample in task.samples(5, seed=0):
        lost = task.nothing_right(sample)
        judged = score(play(task._episode(sample)))
        assert {"messages", "think", "recurring", "tool_one_shot"} <= set(judged.tallies)
        assert len(lost) == 2 * len(judged.tallies)
        for name, (_, asked) in judged.tallies.items():
            assert (lost[f"{name}_right"], lost[f"{name}_asked"]) == (0, asked)


def test_a_wrong_argument_fails_the_episode_but_not_the_world():
    episode = generate(1, PROFILES["recall-1k"])

    def forget_the_port(call):
        return call.name, {**call.arguments, **({"port": "?"} if "port" in call.arguments else {})}

    environment = play(episode, forget_the_port)
    result = score(environment)
    assert environment.done
    assert not result.success
    assert result.tallies["tool_one_shot"][0] == 0
    right, asked = result.tallies["act_one_shot"]
    assert right == asked > 0


def test_an_extra_argument_is_not_exact():
    episode = generate(1, PROFILES["recall-1k"])
    result = score(play(episode, lambda call: (call.name, {**call.arguments, "more": "x"})))
    assert not result.success
    assert result.tallies["tool"][0] == result.tallies["tool"][1]


def test_a_wrong_tool_ends_the_turn_with_an_error():
    episode = generate(1, PROFILES["recall-1k"])
    environment = Environment(episode)
    seen = environment.call("fly", {})
    assert "error" in json.loads(seen.text)
    assert seen.turn_over
    assert not seen.exact
    assert environment.request == episode.turns[1].text


def test_null_agent_gets_nothing_and_comes_to_an_end():
    episode = generate(1, PROFILES["recall-1k"])
    environment = Environment(episode)
    while not environment.done:
        environment.reply("")
    result = score(environment)
    assert not result.success
    assert "messages" in result.tallies
    assert all(right == 0 for right, _ in result.tallies.values())


def test_every_agent_is_asked_for_the_same_facts():
    episode = generate(2, PROFILES["recall-5k"])
    gold = score(play(episode))
    mute = Environment(episode)
    while not mute.done:
        mute.abandon()
    silent = score(mute)
    assert silent.tallies == {name: (0, asked) for name, (_, asked) in gold.tallies.items()}


def test_cursors_count_up_also_over_errors():
    episode = generate(1, PROFILES["recall-1k"])
    environment = Environment(episode)
    environment.call("fly", {})
    call = episode.turns[1].calls[0]
    assert json.loads(environment.call(call.name, call.arguments).text)["cursor"] == 1
    while not environment.done:
        environment.abandon()
    with pytest.raises(RuntimeError, match="over"):
        environment.reply("")
