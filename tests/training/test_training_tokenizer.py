import json

import pytest

from agentbench_kv.adapters.micro.generate import (
    CURRICULUM,
    NAMES,
    PROFILES,
    SYLLABLES,
    generate,
    held_out_seed,
)
from agentbench_kv.training.micro.conversation import whole_session
from agentbench_kv.training.micro.tokenizer import MARKERS, SPECIALS, build_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return build_tokenizer()


def as_messages(episode, arguments=lambda given: given):
    messages = [{"role": "system", "content": episode.system}]
    cursor = 0
    for turn in episode.turns:
        messages.append({"role": "user", "content": turn.text})
        for call in turn.calls:
            function = {"name": call.name, "arguments": arguments(call.arguments)}
            tool_calls = [{"type": "function", "function": function}]
            thought = {"reasoning_content": call.think, "content": ""}
            messages.append({"role": "assistant", **thought, "tool_calls": tool_calls})
            messages.append({"role": "tool", "content": call.result_json(cursor)})
            cursor += 1
        reply = {"role": "assistant", "content": turn.reply.text}
        if turn.reply.think is not None:
            reply["reasoning_content"] = turn.reply.think
        messages.append(reply)
    return messages


@pytest.mark.parametrize("profile", [*PROFILES.values(), *CURRICULUM], ids=lambda it: it.name)
@pytest.mark.parametrize("arguments", [json.dumps, dict], ids=["string", "dict"])
def test_template_gives_the_training_text(tokenizer, profile, arguments):
    for seed in range(8):
        episode = generate(held_out_seed(seed), profile)
        messages = as_messages(episode, arguments)
        tools = episode.tools or None
        ids = tokenizer.apply_chat_template(messages, tools=tools, return_dict=False)
        text = whole_session(episode).text
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer(text)["input_ids"]


def test_pieces_of_a_session_tokenise_as_the_whole(tokenizer):
    for seed in range(8):
        episode = generate(held_out_seed(seed), PROFILES["recall-1k"])
        messages = as_messages(episode)
        whole = tokenizer.apply_chat_template(messages, tools=episode.tools, return_dict=False)
        for end, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = tokenizer.apply_chat_template(
                messages[:end], tools=episode.tools, add_generation_prompt=True, return_dict=False
            )
            assert whole[: len(prompt)] == prompt
            raw = raws(episode)[sum(m["role"] == "assistant" for m in messages[:end])]
            spoken = tokenizer(raw + "<|im_end|>\n")["input_ids"]
            assert whole[len(prompt) : len(prompt) + len(spoken)] == spoken


def raws(episode):
    return [message.raw for turn in episode.turns for message in (*turn.calls, turn.reply)]


def test_codes_are_two_tokens_and_names_one(tokenizer):
    for first in SYLLABLES:
        for second in SYLLABLES:
            assert tokenizer.tokenize(f'bag/{first}{second}"') == ["bag", "/", first, second, '"']
    for name in NAMES:
        assert tokenizer.tokenize(f'{{"{name}#bagu,{name}') == [
            '{"',
            name,
            "#",
            "ba",
            "gu",
            ",",
            name,
        ]


def test_any_text_comes_back(tokenizer):
    text = "Größe  42\t\n\n日本 🎉 <think>\nx = {'a': [1.5]}\n</think>\r\n del foo\u200b"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_markers_survive_decoding_and_specials_do_not(tokenizer):
    text = "".join(MARKERS)
    ids = tokenizer(text + "".join(SPECIALS))["input_ids"]
    assert len(ids) == len(MARKERS) + len(SPECIALS)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_building_is_deterministic(tokenizer):
    assert build_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_tool_messages_share_a_user_message(tokenizer):
    messages = [{"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    response = "\n<tool_response>\n{}\n</tool_response>"
    assert text == "<|im_start|>user" + response.format(1) + response.format(2) + "<|im_end|>\n"
