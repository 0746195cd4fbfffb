"""Answers held to a schema or to a call: grammars, what the engine draws, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentbench_kv.adapters.micro.generate import PROFILES, generate, held_out_seed
from agentbench_kv.engines.base import EngineOptions, Generation, Sampling
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.engines.scripted import ScriptedEngine
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.gateway import Gateway
from agentbench_kv.gateway.exchange import Options
from agentbench_kv.gateway.grammar import GrammarCompiler, JsonFormat, ToolChoice
from agentbench_kv.gateway.http import BackgroundServer
from agentbench_kv.methods.base import Phase
from agentbench_kv.phases.machine import PhaseMachine
from agentbench_kv.phases.syntax import SYNTAXES
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.registry import make_method

pytest.importorskip("llguidance", reason="llguidance is not installed")

MICRO = Path(str(files("agentbench_kv.models"))) / "micro"
FORCED = ToolChoice("required")
PRICE = {
    "type": "object",
    "properties": {"price": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["price"],
    "additionalProperties": False,
}
USER = [{"role": "user", "content": "Weather?"}]


def tool(name: str, parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [tool("get_weather", CITY), tool('ask "é"', {"type": "object", "properties": {}})]


@pytest.fixture(scope="module")
def codec() -> TokenCodec:
    return TokenCodec(load_tokenizer(MICRO))


def accepts(codec: TokenCodec, text: str, **asked: Any) -> bool:
    """Whether a grammar lets a text through and lets it end there."""
    syntax = SYNTAXES[asked.pop("syntax", "hermes")]
    compiler = GrammarCompiler(codec, syntax, [codec.added["<|im_end|>"]])
    given = {"choice": ToolChoice(), "answer": None, "tools": TOOLS, "thinking": False, **asked}
    constraint = compiler.constraint(**given)
    assert constraint is not None
    for token in [*codec.encode(text), codec.added["<|im_end|>"]]:
        if not constraint.allowed()[token]:
            return False
        constraint.accept(token)
    return not constraint.problem


def called(name: str, arguments: str, key: str = "arguments") -> str:
    return f'{{"name": {json.dumps(name)}, "{key}": {arguments}}}'


HERMES = "<tool_call>\n{}\n</tool_call>"
ROME = HERMES.format(called("get_weather", '{"city": "Rome"}'))


@pytest.mark.parametrize(
    ("text", "asked", "fits"),
    [
        (ROME, {"choice": FORCED}, True),
        (f"<think>\nhm </tool\n</think>\n\n{ROME}", {"choice": FORCED}, True),
        (f"{ROME}\n{ROME}", {"choice": FORCED}, True),
        (f"{ROME}\n{ROME}", {"choice": ToolChoice("required", parallel=False)}, False),
        ("It rains.", {"choice": FORCED}, False),
        (f"Well. {ROME}", {"choice": FORCED}, False),
        ("<think>\nhm\n</think>\n\n", {"choice": FORCED}, False),
        (HERMES.format(called("get_weather", "{}")), {"choice": FORCED}, False),
        (HERMES.format(called("get_weather", '{"city": 5}')), {"choice": FORCED}, False),
        (HERMES.format(called("get_weather", '{"city": "a", "b": 1}')), {"choice": FORCED}, False),
        (HERMES.format(called("nothing", "{}")), {"choice": FORCED}, False),
        (HERMES.format(called('ask "é"', "{}")), {"choice": FORCED}, True),
        (ROME, {"choice": ToolChoice("required", 'ask "é"')}, False),
        (f"hm\n</think>\n\n{ROME}", {"choice": FORCED, "thinking": True}, True),
        (ROME, {"choice": FORCED, "thinking": True}, False),
        (called("get_weather", '{"city": "Rome"}', "parameters"),
         {"choice": FORCED, "syntax": "llama3_json"}, True),
        ('{"price": 12}', {"answer": JsonFormat(PRICE)}, True),
        ('{\n  "price": 12\n}', {"answer": JsonFormat(PRICE)}, True),
        ('{"price":\n\n12}', {"answer": JsonFormat(PRICE)}, False),
        ('{"price": 100}', {"answer": JsonFormat(PRICE)}, False),
        ("<think>\n{\n</think>\n\n" + '{"price": 12}', {"answer": JsonFormat(PRICE)}, True),
        ('{"any": [1, {"b": null}]}', {"answer": JsonFormat()}, True),
        ("[1]", {"answer": JsonFormat()}, False),
        (ROME, {"answer": JsonFormat(PRICE)}, True),
        (ROME, {"answer": JsonFormat(PRICE), "tools": None}, False),
        (ROME, {"answer": JsonFormat(PRICE), "choice": ToolChoice("none")}, False),
        ('{"price": 12}', {"answer": JsonFormat(PRICE), "choice": FORCED}, False),
    ],
)  # fmt: skip
def test_what_fits(codec: TokenCodec, text: str, asked: dict[str, Any], fits: bool) -> None:
    assert accepts(codec, text, **asked) is fits


def test_a_schema_may_refer_to_its_own_definitions(codec: TokenCodec) -> None:
    schema = {"$defs": {"n": {"type": "integer"}}, "properties": {"a": {"$ref": "#/$defs/n"}}}
    tools = [tool("f", schema)]
    assert accepts(codec, HERMES.format(called("f", '{"a": 1}')), choice=FORCED, tools=tools)
    assert not accepts(codec, HERMES.format(called("f", '{"a": "1"}')), choice=FORCED, tools=tools)


def test_nothing_is_held_back_without_need(codec: TokenCodec) -> None:
    compiler = GrammarCompiler(codec, SYNTAXES["hermes"], [2])
    assert compiler.constraint(ToolChoice(), None, TOOLS, thinking=False) is None


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"answer": JsonFormat({"not": {}}, strict=True)}, "the answer cannot be enforced"),
        ({"answer": JsonFormat({"$ref": "#"})}, "the answer cannot be enforced"),
        ({"answer": JsonFormat({"enum": []})}, "Unsatisfiable"),
        ({"answer": JsonFormat({"$ref": "https://example.org/s"})}, "does not fetch"),
        ({"choice": FORCED, "tools": None}, "there are no tools"),
        ({"choice": ToolChoice("required", "f")}, "the tools are get_weather"),
        ({"choice": FORCED, "tools": [{}]}, "a function with a name"),
        ({"choice": FORCED, "tools": [tool("f", 5)]}, "no JSON schema"),
        ({"choice": FORCED, "tools": [tool("f", {"type": "string"})]}, "no object's schema"),
        ({"choice": FORCED, "tools": [tool("f", {"properties": 5})]}, "tool 'f' cannot be"),
        ({"choice": FORCED, "syntax": "glm"}, "no grammar for calls in 'glm' syntax"),
        ({"choice": FORCED, "syntax": "none"}, "no grammar for calls in 'none' syntax"),
        ({"answer": JsonFormat(), "syntax": "harmony"}, "no grammar for answers"),
    ],
)
def test_what_cannot_be_held_is_refused(
    codec: TokenCodec, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        accepts(codec, "", **asked)


def test_without_strict_what_cannot_be_enforced_is_left_out(codec: TokenCodec) -> None:
    loose = {**PRICE, "not": {"const": {}}}
    assert accepts(codec, '{"price": 12}', answer=JsonFormat(loose))
    with pytest.raises(UsageError):
        accepts(codec, '{"price": 12}', answer=JsonFormat(loose, strict=True))


@pytest.fixture(scope="module")
def micro() -> Iterator[Gateway]:
    method = make_method("agentkv", "256")
    engine = EmbeddedEngine.create(EngineOptions("micro", method))
    yield Gateway(engine)
    engine.shutdown()


def opening() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The first messages and the tools of a session of the micro task."""
    episode = generate(held_out_seed(0), PROFILES["recall-1k"])
    first = {"role": "user", "content": episode.turns[0].text}
    return [{"role": "system", "content": episode.system}, first], episode.tools


@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_a_real_model_answers_in_the_schema(micro: Gateway, temperature: float) -> None:
    messages, _ = opening()
    for seed in range(3):
        options = Options(
            answer=JsonFormat(PRICE), temperature=temperature, seed=seed, max_tokens=400
        )
        found = micro.chat(None, messages, None, options)
        if found.finish_reason == "stop":  # a thought may take all there is
            assert set(json.loads(found.content)) == {"price"}
            assert 1 <= json.loads(found.content)["price"] <= 99


def test_forced_calls_keep_log_and_phases_exact(micro: Gateway) -> None:
    """The model would say something else: the call is forced on it, token by token."""
    messages, tools = opening()
    choice = ToolChoice("required", tools[-1]["function"]["name"], parallel=False)
    for turn in range(3):
        found = micro.chat("forced", messages, tools, Options(tool_choice=choice, max_tokens=120))
        assert found.finish_reason == "tool_calls"
        (call,) = found.tool_calls
        assert call["function"]["name"] == choice.name
        assert set(json.loads(call["function"]["arguments"])) <= set(
            tools[-1]["function"]["parameters"]["properties"]
        )
        assert found.turn.reset is False
        assert (found.turn.cached_tokens > 0) == (turn > 0)
        result = {"role": "tool", "tool_call_id": call["id"], "content": '{"error": "no"}'}
        messages = [*messages, found.message, result]
    tokens, phases = micro.token_log("forced")
    assert phases == [int(phase) for phase in PhaseMachine(micro.table).label_many(tokens)]
    assert phases.count(int(Phase.ACT)) > 20
    report = micro.close_report("forced")
    assert report.stats.logical == len(tokens)
    assert sum(len(ids) for ids in report.outputs) == report.stats.decode_tokens


def test_a_dead_end_ends_its_own_session_only(micro: Gateway) -> None:
    """A grammar that fails in the middle: the neighbour's tokens are those it gets alone."""

    messages, tools = opening()
    alone = micro.chat(None, messages, tools, Options(max_tokens=40)).token_ids
    constraint = micro._grammars.constraint(ToolChoice(), JsonFormat(), None, thinking=False)
    assert constraint is not None
    matcher, drawn = constraint._matcher, []

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(matcher, name)

        def is_error(self) -> bool:
            return len(drawn) > 5

        def consume_token(self, token: int) -> bool:
            drawn.append(token)
            return bool(matcher.consume_token(token))

    constraint._matcher = Failing()
    engine = micro.engine
    machine = micro._new_session("x").labeller
    engine.open("dead", machine)
    ids = micro.codec.encode("<|im_start|>assistant\n")
    engine.extend("dead", ids, machine.label_many(ids))
    ends = frozenset(engine.info.eos_token_ids)
    dead = engine.generate(
        "dead", Sampling(200, stop_token_ids=ends, constraint=constraint, temperature=1.0)
    )
    beside = micro.chat(None, messages, tools, Options(max_tokens=40)).token_ids
    assert list(dead)[-1] in ends
    assert constraint.problem
    assert beside == alone
    engine.close("dead")


@pytest.fixture
def script(tokenizer_path: Path) -> Iterator[Callable[..., str]]:
    """Serve an engine that says the given texts; return the URL."""
    servers: list[BackgroundServer] = []

    def serve(*texts: str) -> str:
        engine = ScriptedEngine(lambda _: texts, tokenizer_path=tokenizer_path)
        servers.append(BackgroundServer(Gateway(engine)).__enter__())
        return servers[-1].url

    yield serve
    for server in servers:
        server.__exit__()


def ask(url: str, **body: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(f"{url}/chat/completions", json={"model": "gold", "messages": USER, **body})
    return answer.status_code, answer.json()


def test_a_script_that_breaks_its_request_is_an_error(script: Callable[..., str]) -> None:
    status, body = ask(script("It rains."), tools=TOOLS, tool_choice="required")
    assert status == 400
    assert "the script breaks" in body["error"]["message"]
    status, body = ask(script(ROME), tools=TOOLS, tool_choice="required")
    assert status == 200
    assert body["choices"][0]["finish_reason"] == "tool_calls"


class Unheld(ScriptedEngine):
    """An engine whose backend knows nothing of grammars."""

    def generate(self, session: str, sampling: Sampling) -> Generation:
        return super().generate(session, replace(sampling, constraint=None))


@pytest.mark.parametrize(
    ("text", "asked", "right"),
    [
        ("It rains.", {"answer": JsonFormat()}, False),
        ('{"a": 1', {"answer": JsonFormat()}, False),
        ('{"a": 1}', {"answer": JsonFormat()}, True),
        ("It rains.", {"tool_choice": FORCED}, False),
        ('{"a": 1}', {"tool_choice": FORCED}, False),
        (ROME, {"tool_choice": FORCED}, True),
        ('{"a": "the <think> tag"}', {"answer": JsonFormat()}, True),
        ('{"a": ' + "7" * 5000 + "}", {"answer": JsonFormat()}, True),
        (ROME.replace("Rome", "</tool_call>"), {"tool_choice": FORCED}, True),
        ("It rains.", {"answer": JsonFormat(), "max_tokens": 2}, True),  # cut off, and says so
        ("It rains.", {"answer": JsonFormat(), "stop": ("rains",)}, True),  # by the client
    ],
)
def test_a_backend_that_holds_to_no_grammar_is_found_out(
    tokenizer_path: Path, text: str, asked: dict[str, Any], right: bool
) -> None:
    gateway = Gateway(Unheld(lambda _: [text], tokenizer_path=tokenizer_path))
    tools = TOOLS if "tool_choice" in asked else None
    if right:
        gateway.chat(None, USER, tools, Options(**asked))
        return
    with pytest.raises(KVBenchError, match="has not the form that was asked for"):
        gateway.chat(None, USER, tools, Options(**asked))


def test_one_call_only_ends_the_answer_behind_it(script: Callable[..., str]) -> None:
    url = script(f"{ROME}\n{ROME}", f"{ROME}\n{ROME}")
    for parallel, calls in ((False, 1), (True, 2)):
        _, body = ask(url, tools=TOOLS, parallel_tool_calls=parallel)
        assert len(body["choices"][0]["message"]["tool_calls"]) == calls


def test_json_that_may_not_call_is_never_a_call(script: Callable[..., str]) -> None:
    answer = '{"name": "Bob"}'
    _, body = ask(script(answer), response_format={"type": "json_object"})
    assert body["choices"][0]["message"]["content"] == answer


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "required"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": 5}, "response_format"),
        ({"tool_choice": {"type": "function", "function": {}}, "tools": TOOLS}, "tool_choice"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"logprobs": True}, "has no logprobs, which logprobs of this request needs"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
def test_malformed_wishes_are_400(script: Callable[..., str], body: Any, words: str) -> None:
    status, answer = ask(script("x"), **body)
    assert status == 400
    assert words in answer["error"]["message"]


def test_engines_without_it_say_so(tokenizer_path: Path) -> None:
    class Free(ScriptedEngine):
        capabilities = frozenset()

    gateway = Gateway(Free(lambda _: ["x"], tokenizer_path=tokenizer_path))
    with pytest.raises(UsageError, match="has no constrain, which response_format"):
        gateway.chat(None, USER, None, Options(answer=JsonFormat()))
    with pytest.raises(UsageError, match="has no constrain, which tool_choice"):
        gateway.chat(None, USER, TOOLS, Options(tool_choice=FORCED))
    assert gateway.sessions() == []
