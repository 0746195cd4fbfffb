"""The phase machine against a reference that works on characters."""

from __future__ import annotations

import json
import random
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.machine import (
    CHATML,
    COHERE,
    DEEPSEEK,
    FAMILIES,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    KIMI,
    LLAMA3,
    LLAMA4,
    MINIMAX,
    MISTRAL,
    PHI,
    PHI4,
    PLAIN,
    SEED,
    Family,
    PhaseMachine,
    PhaseTable,
    PromptPhases,
    add_run,
    cut_runs,
    labeller_source,
)
from agentbench_kv.phases.opening import system_tokens
from agentbench_kv.phases.tokens import TokenCodec

OPEN = {"<think>": Phase.THINK, "<tool_call>": Phase.ACT, "<tool_response>": Phase.TOOL}
CLOSE = {"</think>": Phase.THINK, "</tool_call>": Phase.ACT, "</tool_response>": Phase.TOOL}
OWNERS = {"assistant": {Phase.THINK, Phase.ACT}, "user": {Phase.TOOL}}
STRUCTURE = ["<|im_start|>", "<|im_end|>"]
ALL = [*OPEN, *CLOSE, *STRUCTURE]


class Characters:
    """Phases of a ChatML text, one character (or one whole marker) at a time."""

    def __init__(self) -> None:
        self.role: str | None = None
        self.header: str | None = None
        self.stack: list[Phase] = []

    def here(self) -> Phase:
        if self.stack:
            return self.stack[-1]
        return Phase.TOOL if self.role == "tool" else Phase.OTHERS

    def character(self, char: str) -> Phase:
        if self.header is not None:
            if char == "\n":
                self.role, self.header = self.header, None
                return self.here()
            self.header += char
            return Phase.TOOL if self.header == "tool" else Phase.OTHERS
        return self.here()

    def marker(self, marker: str) -> Phase:
        if marker == "<|im_start|>":
            self.role, self.header, self.stack = None, "", []
            return Phase.OTHERS
        if marker == "<|im_end|>":
            self.stack = []
            phase = self.here()
            self.role = self.header = None
            return phase
        return self.span(marker)

    def span(self, marker: str) -> Phase:
        phase = OPEN.get(marker, CLOSE.get(marker, Phase.OTHERS))
        if phase not in OWNERS.get(self.role or "", set()):
            return self.here()
        if marker in OPEN:
            if phase not in self.stack:
                self.stack.append(phase)
            return phase
        if phase not in self.stack:
            return self.here()
        while self.stack.pop() != phase:
            pass
        return phase


def reference(codec: TokenCodec, tokens: list[int]) -> list[Phase]:
    """Label tokens through the characters they consist of (ASCII texts only)."""
    single = {codec.added[m]: m for m in ALL if m in codec.added}
    textual = [m for m in ALL if m not in codec.added]
    chars, text, labels = Characters(), "", []
    for token in tokens:
        if token in single:
            labels.append(chars.marker(single[token]))
            text = ""
            continue
        label, completed = Phase.OTHERS, None
        for char in codec.piece(token):
            in_header = chars.header is not None
            label = chars.character(char)
            text = "" if in_header else text + char
            done = next((m for m in textual if text.endswith(m)), None)
            if done and chars.role is not None:
                owned = chars.here()
                phase = OPEN.get(done, CLOSE.get(done, Phase.OTHERS))
                label = chars.span(done)
                if phase in OWNERS.get(chars.role, set()):
                    completed = label
                else:
                    label = owned
        labels.append(label if completed is None else completed)
    return labels


def transcript(rng: random.Random) -> str:
    """Return a random conversation, well-formed or not."""
    words = ["the", " weather", "\n", " ok", "{", '"x"', " tool", "<", "think>", "toolbox\n", ">"]
    parts = []
    for _ in range(rng.randrange(1, 7)):
        role = rng.choice(["system", "user", "user", "assistant", "assistant", "tool", "toolbox"])
        body = []
        for _ in range(rng.randrange(0, 8)):
            kind = rng.random()
            if kind < 0.35:
                body.append(rng.choice([*OPEN, *CLOSE]))
            elif kind < 0.5:
                name = rng.choice(["think", "tool_call", "tool_response"])
                body.append(f"<{name}>\n{rng.choice(words)}\n</{name}>")
            else:
                body.append("".join(rng.choices(words, k=rng.randrange(1, 5))))
        end = "<|im_end|>\n" if rng.random() < 0.85 else ""
        parts.append(f"<|im_start|>{role}\n{''.join(body)}{end}")
    return "".join(parts)


@pytest.mark.parametrize("kind", ["tokenizer", "full_tokenizer"])
def test_500_transcripts_match_the_reference(kind: str, request: pytest.FixtureRequest) -> None:
    codec = TokenCodec(request.getfixturevalue(kind))
    table = PhaseTable.for_tokenizer(codec)
    rng = random.Random(20)
    seen: set[Phase] = set()
    for _ in range(500):
        text = transcript(rng)
        tokens = codec.encode(text)
        labels = PhaseMachine(table).label_many(tokens)
        expected = reference(codec, tokens)
        assert labels == expected, [
            (codec.piece(t), a.name, b.name)
            for t, a, b in zip(tokens, labels, expected, strict=True)
        ]
        seen |= set(labels)
    assert seen == set(Phase)


@pytest.mark.parametrize("kind", ["tokenizer", "full_tokenizer"])
def test_any_split_gives_the_same_labels(kind: str, request: pytest.FixtureRequest) -> None:
    codec = TokenCodec(request.getfixturevalue(kind))
    table = PhaseTable.for_tokenizer(codec)
    rng = random.Random(21)
    for _ in range(100):
        tokens = codec.encode(transcript(rng))
        whole = PhaseMachine(table).label_many(tokens)
        machine, labels, at = PhaseMachine(table), [], 0
        while at < len(tokens):
            size = rng.randrange(1, 9)
            machine = machine.copy()
            labels += machine.label_many(tokens[at : at + size])
            at += size
        assert labels == whole
        one = PhaseMachine(table)
        assert [one.label(token) for token in tokens] == whole


HEAD = ("<|start_header_id|>", "<|end_header_id|>")
TURN = "<|START_OF_TURN_TOKEN|>"
# What labels a conversation of a family is made of: a list of (text, phase) for each part.
Part = list[tuple[str, Phase]]
N, T, A, R = Phase.OTHERS, Phase.THINK, Phase.ACT, Phase.TOOL
THOUGHT: Part = [("<think>", T), ("hm", T), ("</think>", T), ("\n", N)]
PARTS: dict[Family, dict[str, list[Part]]] = {
    DEEPSEEK: {
        "user": [[("<｜User｜>", N), ("hi", N)]],
        "assistant": [
            [
                ("<｜Assistant｜>", N),
                *THOUGHT,
                ("<｜tool▁calls▁begin｜>", A),
                ("<｜tool▁call▁begin｜>", A),
                ("f", A),
                ("<｜tool▁sep｜>", A),
                ("{}", A),
                ("<｜tool▁call▁end｜>", A),
                ("<｜tool▁calls▁end｜>", A),
                ("<｜end▁of▁sentence｜>", N),
            ],
            [("<｜Assistant｜>", N), ("ok", N), ("<｜end▁of▁sentence｜>", N)],
        ],
        "tool": [
            [("<｜tool▁output▁begin｜>", R), ("7", R), ("<｜tool▁output▁end｜>", R), ("so", N)]
        ],
    },
    MISTRAL: {
        "user": [[("[INST]", N), ("hi", N), ("[/INST]", N)]],
        "assistant": [
            [("[TOOL_CALLS]", A), ("f", A), ("[ARGS]", A), ("{}", A), ("</s>", N)],
            [("[THINK]", T), ("hm", T), ("[/THINK]", T), ("ok", N), ("</s>", N)],
        ],
        "tool": [[("[TOOL_RESULTS]", R), ("7", R), ("[/TOOL_RESULTS]", R), ("so", N)]],
    },
    GLM: {
        "user": [[("<|user|>", N), ("\nhi", N)]],
        "assistant": [
            [
                ("<|assistant|>", N),
                *THOUGHT,
                ("<tool_call>", A),
                ("f", A),
                ("<arg_key>", A),
                ("x", A),
                ("</arg_key>", A),
                ("</tool_call>", A),
            ]
        ],
        "tool": [[("<|observation|>", R), ("\n7", R)]],
    },
    KIMI: {
        "user": [
            [("<|im_user|>", N), ("user", N), ("<|im_middle|>", N), ("hi<", N), ("<|im_end|>", N)]
        ],
        "assistant": [
            [
                ("<|im_assistant|>", N),
                ("assistant", N),
                ("<|im_middle|>", N),
                *THOUGHT,
                ("<|tool_calls_section_begin|>", A),
                ("<|tool_call_begin|>", A),
                ("functions.f:0", A),
                ("<|tool_call_argument_begin|>", A),
                ("{}", A),
                ("<|tool_call_end|>", A),
                ("<|tool_calls_section_end|>", A),
                ("<|im_end|>", N),
            ]
        ],
        "tool": [
            [
                ("<|im_system|>", N),
                ("too", N),
                ("l", R),  # the role is known from here on
                ("<|im_middle|>", R),
                ("7", R),
                ("<|im_end|>", R),
            ]
        ],
    },
}


PARTS |= {
    LLAMA3: {
        "user": [[(f"{HEAD[0]}user{HEAD[1]}\n\nhi", N), ("<|eot_id|>", N)]],
        "assistant": [
            [(f"{HEAD[0]}assistant{HEAD[1]}\n\n", N), ('{"name": "f"}', A), ("<|eot_id|>", N)],
            [
                (f"{HEAD[0]}assistant{HEAD[1]}\n\n", N),
                ("<|python_tag|>", A),
                ("f.call()", A),
                ("<|eom_id|>", N),
            ],
            [(f"{HEAD[0]}assistant{HEAD[1]}\n\nIt is {{7}}", N), ("<|eot_id|>", N)],
        ],
        "tool": [
            [
                (f"{HEAD[0]}ipytho", N),
                (f"n{HEAD[1]}\n\n7", R),  # the role is known from here on
                ("<|eot_id|>", R),
            ]
        ],
    },
    HARMONY: {
        "user": [[("<|start|>user<|message|>hi<|end|>", N)]],
        "assistant": [
            [
                ("<|start|>assistant<|channel|>analysi", N),
                ("s<|message|>hm<|end|>", T),
                ("<|start|>assistant<|channel|>commentary to", N),
                ("=functions.f <|constrain|>json<|message|>{}<|call|>", A),
            ],
            [("<|start|>assistant<|channel|>final<|message|>ok<|return|>", N)],
        ],
        "tool": [
            [
                ("<|start|>functions", N),
                (".f to=assistant<|channel|>commentary<|message|>7<|end|>", R),
            ]
        ],
    },
    SEED: {
        "user": [[("<seed:bos>user\nhi<seed:eos>", N)]],
        "assistant": [
            [
                ("<seed:bos>assistant\n", N),
                ("<seed:think>hm</seed:think>", T),
                ("\n", N),
                ("<seed:tool_call><function=f></function></seed:tool_call>", A),
                ("<seed:eos>", N),
            ]
        ],
        "tool": [[("<seed:bos>too", N), ("l\n7<seed:eos>", R)]],
    },
    MINIMAX: {
        "user": [[("]~b]user\nhi[e~[\n", N)]],
        "assistant": [
            [
                ("]~b]ai\n", N),
                ("<think>hm</think>", T),
                ("\n", N),
                ('<minimax:tool_call><invoke name="f"></invoke></minimax:tool_call>', A),
                ("[e~[\n", N),
            ]
        ],
        "tool": [[("]~b]too", N), ("l\n<response>7</response>[e~[", R), ("\n", N)]],
    },
    COHERE: {
        "user": [[(f"{TURN}<|USER_TOKEN|>hi<|END_OF_TURN_TOKEN|>", N)]],
        "assistant": [
            [
                (f"{TURN}<|CHATBOT_TOKEN|>", N),
                ("<|START_THINKING|>hm<|END_THINKING|>", T),
                ('<|START_ACTION|>[{"tool_name": "f"}]<|END_ACTION|>', A),
                ("<|END_OF_TURN_TOKEN|>", N),
            ]
        ],
        "tool": [
            [
                (f"{TURN}<|SYSTEM_TOKEN|>", N),
                ("<|START_TOOL_RESULT|>7<|END_TOOL_RESULT|>", R),
                ("<|END_OF_TURN_TOKEN|>", N),
            ]
        ],
    },
}
_LLAMA4 = {"start_header_id": "header_start", "end_header_id": "header_end", "_id|>": "|>"}


def _renamed(text: str) -> str:
    for old, new in _LLAMA4.items():
        text = text.replace(old, new)
    return text


PARTS[LLAMA4] = {
    role: [[(_renamed(text), phase) for text, phase in part] for part in parts]
    for role, parts in PARTS[LLAMA3].items()
}
MARKS = re.compile(
    r"<[|｜][^<>]*?[|｜]>|</?(?:think|tool_call|arg_key|arg_value|seed:\w+|minimax:tool_call)>"
    r"|</s>|\[/?[A-Z_]+\]|\]~b\]|\[e~\["
)


@pytest.mark.parametrize("family", PARTS, ids=lambda family: family.name)
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_conversations_of_other_families_are_labelled_as_they_are_built(
    family: Family, data: st.DataObject
) -> None:
    parts = PARTS[family]
    turns = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))  # results in each
    roles = [role for n in turns for role in ("user", "assistant", *["tool", "assistant"] * n)]
    said = [data.draw(st.sampled_from(parts[role])) for role in roles]
    pieces = [piece for part in said for piece in part]
    texts = [text for options in parts.values() for part in options for text, _ in part]
    vocabulary = Vocabulary(sorted({mark for text in texts for mark in MARKS.findall(text)}))
    table = PhaseTable.for_tokenizer(vocabulary)
    assert table.family is family
    codec, machine = TokenCodec(vocabulary), PhaseMachine(table)
    expected = [phase for text, phase in pieces for _ in codec.encode(text)]
    tokens = codec.encode("".join(text for text, _ in pieces))
    assert machine.label_many(tokens) == expected


SYSTEMS = {
    CHATML: "<|im_start|>system\nBe kind.\n<tools>f</tools><|im_end|>\n",
    DEEPSEEK: "^Be kind.",  # no marker: what comes before the first message
    MISTRAL: "^[SYSTEM_PROMPT]Be kind.[/SYSTEM_PROMPT][AVAILABLE_TOOLS]f[/AVAILABLE_TOOLS]",
    GLM: "^<|system|>\nBe kind.",
    KIMI: (
        "<|im_system|>tool_declare<|im_middle|>f<|im_end|>"
        "<|im_system|>system<|im_middle|>Be kind.<|im_end|>"
    ),
    LLAMA3: f"^{HEAD[0]}system{HEAD[1]}\n\nBe kind.<|eot_id|>",
    HARMONY: "<|start|>system<|message|>hm<|end|><|start|>developer<|message|># Tools<|end|>",
    SEED: "<seed:bos>system\nBe kind.<seed:eos>",
    MINIMAX: "^]~b]system\nBe kind.[e~[\n",
    COHERE: "^<|SYSTEM_TOKEN|>Be kind.<|END_OF_TURN_TOKEN|>",
}
ASKS = {CHATML: "<|im_start|>user\nhi<|im_end|>\n"}
ANSWERS = {CHATML: "<|im_start|>assistant\n", HARMONY: "<|start|>assistant"}


@pytest.mark.parametrize("family", SYSTEMS, ids=lambda family: family.name)
def test_the_system_message_ends_where_the_first_other_one_begins(family: Family) -> None:
    said = {"user": ASKS.get(family), "assistant": ANSWERS.get(family)}
    for role, text in said.items():
        pieces = PARTS[family][role][0] if text is None else [(text, N)]
        said[role] = "".join(piece for piece, _ in pieces).removeprefix(TURN)
    whole = SYSTEMS[family] + str(said["user"]) + str(said["assistant"])
    marks = set(MARKS.findall(whole)) | set(family.detect)
    vocabulary = Vocabulary(sorted(marks, key=len, reverse=True))
    table = PhaseTable.for_tokenizer(vocabulary)
    assert table.family is family
    size = len(vocabulary.encode(SYSTEMS[family]))
    # Mistral's answers have no marker, and follow a user's message always.
    for text in (said["user"], *([] if family is MISTRAL else [said["assistant"]])):
        assert system_tokens(table, vocabulary.encode(SYSTEMS[family] + str(text))) == size
    # A later system message is not the leading one.
    assert system_tokens(table, vocabulary.encode(whole + SYSTEMS[family])) == size
    assert system_tokens(table, vocabulary.encode(str(said["user"]) + whole)) == 0


def test_without_messages_no_token_is_a_system_message() -> None:
    vocabulary = Vocabulary(["<|im_start|>", "<|im_end|>"])
    table = PhaseTable.for_tokenizer(vocabulary)
    assert system_tokens(table, vocabulary.encode("a plain text")) == 0
    assert system_tokens(table, []) == 0
    only = vocabulary.encode("<|im_start|>system\nBe kind.<|im_end|>\n")
    assert system_tokens(table, only) == len(only)
    plain = PhaseTable.for_tokenizer(Vocabulary([]))
    assert system_tokens(plain, vocabulary.encode("system\nBe kind.")) == 0


def test_families_are_told_apart_by_their_tokens() -> None:
    for family in FAMILIES:
        found = PhaseTable.for_tokenizer(
            Vocabulary([*family.detect, *family.opens, *family.closes])
        )
        assert found.family is family, family.name


def runs_of(text: str, added: list[str], syntax: str) -> list[tuple[str, str]]:
    vocabulary = Vocabulary(added)
    table = PhaseTable.for_tokenizer(vocabulary, syntax)
    tokens = vocabulary.encode(text)
    runs: list[list[str]] = []
    for token, phase in zip(tokens, PhaseMachine(table).label_many(tokens), strict=True):
        if not runs or runs[-1][1] != phase.name:
            runs.append(["", phase.name])
        runs[-1][0] += vocabulary.decode([token])
    return [(text, phase) for text, phase in runs]


def test_prompted_json_calls_are_act_fenced_or_bare_and_their_results_tool() -> None:
    said = "<|im_start|>assistant\n"
    added = ["<|im_start|>", "<|im_end|>"]
    assert runs_of(f"{said}I call\n```json\n{{}}\n```\nso<|im_end|>", added, "json") == [
        (f"{said}I call\n```jso", "OTHERS"),
        ("n\n{}\n```", "ACT"),
        ("\nso<|im_end|>", "OTHERS"),
    ]
    assert runs_of(f'{said}\n [{{"name": 1}}]<|im_end|>', added, "json") == [
        (f"{said}\n ", "OTHERS"),
        ('[{"name": 1}]', "ACT"),
        ("<|im_end|>", "OTHERS"),
    ]
    assert runs_of(f"{said}x{{}}<|im_end|>", added, "json") == [
        (f"{said}x{{}}<|im_end|>", "OTHERS")
    ]
    result = "<|im_start|>user\n<tool_response>7</tool_response><|im_end|>"
    assert runs_of(result, added, "json")[1] == (">7</tool_response>", "TOOL")
    gemma = "<start_of_turn>user\n<tool_response>7</tool_response><end_of_turn>"
    assert runs_of(gemma, ["<start_of_turn>", "<end_of_turn>"], "json")[1][1] == "TOOL"
    assert {phase for _, phase in runs_of(gemma, ["<start_of_turn>"], "none")} == {"OTHERS"}


def test_bare_calls_of_llama_are_act_and_thoughts_before_them_do_not_matter() -> None:
    added = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    head = "<|start_header_id|>assistant<|end_header_id|>\n\n"
    assert runs_of(f'{head}{{"name": "f"}}<|eot_id|>', added, "auto") == [
        (head, "OTHERS"),
        ('{"name": "f"}', "ACT"),
        ("<|eot_id|>", "OTHERS"),
    ]
    assert runs_of(f"{head}<think>a</think>\n{{}}<|eot_id|>", added, "auto")[-2:] == [
        ("{}", "ACT"),
        ("<|eot_id|>", "OTHERS"),
    ]


NAMES = {
    GEMMA: ["<start_of_turn>", "<end_of_turn>"],
    GRANITE: ["<|start_of_role|>", "<|end_of_role|>", "<|end_of_text|>"],
    PHI: [*PHI.opens, *PHI.closes],
    PHI4: ["<|im_start|>", "<|im_sep|>", "<|im_end|>"],
    **{family: [*family.opens, *family.closes, *family.detect] for family in PARTS},
    LLAMA3: ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"],
    HARMONY: ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"],
}
MARKUP = ["assistant", "user", "tool", "ipython", "functions.f", " to=functions.f", "analysis"]
MARKUP += ["\n", "x", "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_", "response>"]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_a_machine_resumed_from_its_document_goes_on_as_the_original(
    family: Family, data: st.DataObject, tokenizer: Any
) -> None:
    """Whatever came before and whatever comes after, through JSON as a backend gets it."""
    codec = tokenizer if family is CHATML else Vocabulary(NAMES[family])
    table = PhaseTable.for_tokenizer(TokenCodec(tokenizer) if family is CHATML else codec)
    assert table.family is family
    words = st.sampled_from([*MARKUP, *NAMES.get(family, STRUCTURE)])
    encode = table.codec.encode
    tokens = encode("".join(data.draw(st.lists(words, max_size=30))))
    at = data.draw(st.integers(0, len(tokens)))
    original = PhaseMachine(table)
    runs: list[list[int]] = []
    before = original.label_many(tokens[:at])
    for phase in before:
        add_run(runs, [phase])
    said = json.dumps(asdict(PromptPhases("markers", original.document(), runs)))
    prompt = PromptPhases(**json.loads(said))
    resumed = PhaseMachine.from_document(table, prompt.state)
    assert prompt.expand() == before
    assert resumed.state == original.state
    assert resumed.label_many(tokens[at:]) == original.label_many(tokens[at:])


@given(phases=st.lists(st.sampled_from(Phase), max_size=30), length=st.integers(0, 35))
def test_runs_are_cut_where_their_tokens_are(phases: list[Phase], length: int) -> None:
    runs: list[list[int]] = []
    add_run(runs, phases)
    cut = cut_runs(runs, length)
    assert PromptPhases(runs=cut).expand() == phases[:length]
    assert PromptPhases(runs=runs).expand() == phases
    assert all(tokens > 0 for _, tokens in cut)
    add_run(cut, [Phase.ACT])
    assert PromptPhases(runs=cut).expand() == [*phases[:length], Phase.ACT]


def labelled(tokenizer: Any, text: str) -> list[tuple[str, str]]:
    codec = TokenCodec(tokenizer)
    tokens = codec.encode(text)
    phases = PhaseMachine(PhaseTable.for_tokenizer(codec)).label_many(tokens)
    runs: list[tuple[str, str]] = []
    for token, phase in zip(tokens, phases, strict=True):
        if runs and runs[-1][1] == phase.name:
            runs[-1] = (runs[-1][0] + codec.piece(token), phase.name)
        else:
            runs.append((codec.piece(token), phase.name))
    return runs


def test_both_forms_of_tool_messages(full_tokenizer: Any) -> None:
    assert labelled(full_tokenizer, "<|im_start|>tool\n1<|im_end|>\n") == [
        ("<|im_start|>", "OTHERS"),
        ("tool\n1<|im_end|>", "TOOL"),
        ("\n", "OTHERS"),
    ]
    text = "<|im_start|>user\n<tool_response>\n1\n</tool_response><|im_end|>\n"
    assert labelled(full_tokenizer, text) == [
        ("<|im_start|>user\n", "OTHERS"),
        ("<tool_response>\n1\n</tool_response>", "TOOL"),
        ("<|im_end|>\n", "OTHERS"),
    ]


def test_closing_markers_count_to_what_follows_if_asked(
    full_tokenizer: Any, tmp_path: Path
) -> None:
    """A call inside a thought ends in the thought; a message's end belongs to no phase."""
    full_tokenizer.save_pretrained(tmp_path)
    codec = TokenCodec(full_tokenizer)
    text = "<|im_start|>assistant\n<think>a<tool_call>b</tool_call>c</think>d<|im_end|>\n"
    text += "<|im_start|>tool\n1<|im_end|>\n"
    tokens = codec.encode(text)
    found = {}
    for closing in ("own", "next"):
        machine = PhaseMachine(PhaseTable.for_tokenizer(codec, closing=closing))
        found[closing] = machine.label_many(tokens)
        again = labeller_source(machine.labeller_name, tmp_path)({})
        assert again.label_many(tokens) == found[closing]
    changes = [
        (codec.piece(token), own.name, following.name)
        for token, own, following in zip(tokens, found["own"], found["next"], strict=True)
        if own != following
    ]
    assert changes == [
        ("</tool_call>", "ACT", "THINK"),
        ("</think>", "THINK", "OTHERS"),
        ("<|im_end|>", "TOOL", "OTHERS"),
    ]


def test_a_marker_of_several_tokens_starts_its_phase_where_it_is_complete(tokenizer: Any) -> None:
    runs = labelled(tokenizer, "<|im_start|>user\n<tool_response>\n1\n</tool_response> and")
    assert "".join(text for text, phase in runs if phase == "TOOL").endswith("1\n</tool_response>")
    assert runs[0][0].startswith("<|im_start|>user\n")
    assert runs[-1] == (" and", "OTHERS")


def test_spans_nest_and_end_with_their_message(tokenizer: Any) -> None:
    text = "<|im_start|>assistant\n<think>a<tool_call>b</tool_call>c<|im_end|>\n<|im_start|>user\nd"
    assert labelled(tokenizer, text) == [
        ("<|im_start|>assistant\n", "OTHERS"),
        ("<think>a", "THINK"),
        ("<tool_call>b</tool_call>", "ACT"),
        ("c", "THINK"),
        ("<|im_end|>\n<|im_start|>user\nd", "OTHERS"),
    ]


class Vocabulary:
    """A tokenizer whose tokens are its added tokens and single characters."""

    def __init__(self, added: list[str]) -> None:
        self.names = added
        self.added_tokens_decoder: dict[int, Any] = {}
        self.all_special_ids: list[int] = []

    def get_added_vocab(self) -> dict[str, int]:
        return {name: 1000 + index for index, name in enumerate(self.names)}

    def encode(self, text: str, **_: Any) -> list[int]:
        ids = []
        while text:
            name = next((n for n in self.names if text.startswith(n)), text[0])
            ids.append(self.get_added_vocab().get(name, ord(name[0])))
            text = text[len(name) :]
        return ids

    def decode(self, ids: list[int], **_: Any) -> str:
        return "".join(self.names[i - 1000] if i >= 1000 else chr(i) for i in ids)


def test_llama3_is_a_table() -> None:
    names = ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"]
    vocabulary = Vocabulary(names)
    assert PhaseTable.for_tokenizer(vocabulary).family is LLAMA3
    text = (
        "<|start_header_id|>assistant<|end_header_id|>\n\n<|python_tag|>{}<|eot_id|>"
        "<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>"
    )
    assert labelled(vocabulary, text) == [
        ("<|start_header_id|>assistant<|end_header_id|>\n\n", "OTHERS"),
        ("<|python_tag|>{}", "ACT"),
        ("<|eot_id|><|start_header_id|>ipytho", "OTHERS"),
        ("n<|end_header_id|>\n\n7<|eot_id|>", "TOOL"),
    ]


def test_harmony_is_a_table() -> None:
    names = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>"]
    vocabulary = Vocabulary(names)
    assert PhaseTable.for_tokenizer(vocabulary).family is HARMONY
    text = (
        "<|start|>assistant<|channel|>analysis<|message|>hm<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>"
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>"
        "<|start|>assistant<|channel|>final<|message|>ok<|return|>"
    )
    runs = labelled(vocabulary, text)
    assert [(part.strip(), phase) for part, phase in runs] == [
        ("<|start|>assistant<|channel|>analysi", "OTHERS"),
        ("s<|message|>hm<|end|>", "THINK"),
        ("<|start|>assistant<|channel|>commentary to", "OTHERS"),
        ("=functions.f<|message|>{}<|call|>", "ACT"),
        ("<|start|>functions", "OTHERS"),
        (".f to=assistant<|channel|>commentary<|message|>7<|end|>", "TOOL"),
        ("<|start|>assistant<|channel|>final<|message|>ok<|return|>", "OTHERS"),
    ]


def test_a_vocabulary_without_markers_is_all_others(tokenizer: Any) -> None:
    assert PhaseTable.for_tokenizer(Vocabulary([])).family is PLAIN
    assert {phase for _, phase in labelled(Vocabulary([]), "<think>x</think>")} == {"OTHERS"}
    assert PhaseTable.for_tokenizer(tokenizer).family is CHATML
