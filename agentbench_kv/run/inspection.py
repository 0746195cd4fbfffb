"""What the harness makes of a model: engines, template, tool syntax, phases, stops, limits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.budget import Budget
from agentbench_kv.engines.base import Capability
from agentbench_kv.engines.core.gguf_header import read_metadata
from agentbench_kv.engines.embedded.model import model_path, read_document
from agentbench_kv.engines.llamacpp.gguf import ARCHITECTURES
from agentbench_kv.engines.llamacpp.models import refusal, resolve_model
from agentbench_kv.engines.serving.model_facts import read_model
from agentbench_kv.errors import KVBenchError, UsageError
from agentbench_kv.gateway.messages import ChatTemplate, Message, tool_call
from agentbench_kv.phases.machine import PLAIN, PhaseMachine, PhaseTable
from agentbench_kv.phases.syntax import SYNTAXES, ToolSyntax, refuse_tools_without_syntax
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.registry import load_engine, load_method, names
from agentbench_kv.run.engines import check_pair
from agentbench_kv.run.runner import check_all
from agentbench_kv.run.spec import RunSpec, resolve

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
ASKED = {"role": "user", "content": "Weather in Oslo?"}
THOUGHT = "The weather service knows."
RESULT = "19 degrees and sunny"
ANSWER = "It is sunny in Oslo."
_PARTS = {"think": THOUGHT, "act": "get_weather", "tool": RESULT, "others": ANSWER}
SUFFIX = ".gguf"
_METHODS = ("agentkv", "streamingllm", "evoke", "full")
_TASK = "micro/recall-1k"  # any: nothing is played
_NO_LIMIT = 1 << 30  # tokenizers without a limit say more
OK = "ok"
NOT_SHOWN = "ok, but the template shows no thoughts"


@dataclass
class ModelReport:
    """What was found in a model folder or GGUF file."""

    model: str
    architecture: str
    engines: dict[str, str]  # by name: `ok`, or why not
    context_limit: int | None
    longer_context: str  # how the vendor reaches more; empty if nothing says so
    stop_tokens: dict[int, str]
    template: str  # where it comes from; empty: none
    tool_syntax: str
    signs: dict[str, str]  # of the syntax: where each was found
    phase_family: str
    checks: dict[str, str]  # of the template and the phases: `ok`, or what is wrong
    session: list[tuple[str, str]] = field(default_factory=list)  # phase and text, in order
    refused: list[str] = field(default_factory=list)  # besides by engines


def inspect(model: str, tool_syntax: str = "auto") -> ModelReport:
    """Look at a model without loading its weights; UsageError or PrerequisiteError if it is none.

    A folder is not converted for llama.cpp.
    """
    found = _gguf(model) if model.endswith(SUFFIX) else _folder(model)
    codec = TokenCodec(load_tokenizer(found.tokenizer))
    table = PhaseTable.for_tokenizer(codec, tool_syntax)
    report = ModelReport(
        model,
        found.architecture,
        dict(_engines(model, found)),
        found.context_limit,
        _longer_context(found, codec),
        {token: codec.piece(token) for token in found.stops},
        found.template if codec.template else "",
        table.syntax.name,
        _signs(table.syntax, codec),
        table.family.name,
        {},
    )
    _look_at_text(report, table, tool_syntax)
    return report


@dataclass(frozen=True)
class _Found:
    architecture: str
    tokenizer: Path
    template: str
    context_limit: int | None
    stops: tuple[int, ...]
    scaled: bool  # its RoPE is
    unfit: str = ""  # for llama.cpp, before anything is converted


def _folder(model: str) -> _Found:
    path = model_path(model)
    config = read_document(path / "config.json")
    family = str(config.get("model_type"))
    names_of = config.get("architectures")
    listed = ", ".join(map(str, names_of)) if isinstance(names_of, list) else "no architectures"
    unfit = "" if family in ARCHITECTURES else f"kvbench convert does not know {family!r}"
    file = path / "chat_template.jinja"
    where = file if file.exists() else path / "tokenizer_config.json"
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaled = isinstance(scaling, dict) and "factor" in scaling
    try:
        facts = read_model(path)
        limit, stops = facts.context_limit, facts.eos_token_ids
    except KVBenchError:  # the engines say so
        limit, stops = None, ()
    return _Found(f"{listed} ({family})", path, str(where), limit, stops, scaled, unfit)


def _gguf(model: str) -> _Found:
    found = resolve_model(model, Path())  # of a file, nothing is converted
    metadata = read_metadata(found.file)
    name = str(metadata.get("general.architecture"))
    scaled = metadata.get(f"{name}.rope.scaling.type", "none") != "none"
    template, shape = f"tokenizer.chat_template of {found.file.name}", found.shape
    return _Found(
        f"{name} (GGUF)",
        found.tokenizer,
        template,
        shape.context_limit,
        shape.eos_token_ids,
        scaled,
        refusal(metadata),
    )


def _engines(model: str, found: _Found) -> Iterator[tuple[str, str]]:
    """Yield each engine that loads models, and `ok` or why it would not run this one."""
    for name in names("engine"):
        if name == "scripted" or Capability.TEXT in load_engine(name).capabilities:
            continue
        if name == "llamacpp" and found.unfit:
            yield name, found.unfit
        elif name == "llamacpp" and not model.endswith(SUFFIX):
            yield name, f"takes it as GGUF: kvbench convert {model} OUT{SUFFIX}"
        else:
            yield name, _refusal(name, model)


def _refusal(engine: str, model: str) -> str:
    """Return `ok`, or what a run with this engine would say: of every method, or of some."""
    asked, said = 0, dict[str, str]()
    for method in _METHODS:
        size = Budget.parse("1024") if load_method(method).compresses else None
        spec = resolve(RunSpec(engine, model, method, size, _TASK), {})
        try:
            check_pair(engine, load_engine(engine), spec.built_method)
        except UsageError:
            continue  # whatever the model
        asked += 1
        try:
            check_all([spec])
        except KVBenchError as error:
            said[method] = str(error)
    if len(said) == asked and len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "; ".join(f"{method}: {why}" for method, why in said.items()) or OK


def _longer_context(found: _Found, codec: TokenCodec) -> str:
    """Say how more positions than the config has are reached, as far as the folder shows it."""
    most, limit = getattr(codec.tokenizer, "model_max_length", None), found.context_limit
    if found.scaled or limit is None or type(most) is not int or not limit < most < _NO_LIMIT:
        return ""
    factor = -(-most // limit)
    return (
        f"the tokenizer is made for {most:,}: put "
        f'"rope_scaling": {{"rope_type": "yarn", "factor": {factor}.0, '
        f'"original_max_position_embeddings": {limit}}} and "max_position_embeddings": {most} '
        "into a copy of config.json"
    )


def _signs(syntax: ToolSyntax, codec: TokenCodec) -> dict[str, str]:
    """Return the signs of a syntax that are there, and where."""
    places = {"chat template": codec.template, "vocabulary": codec.added}
    found = {
        sign: [place for place, texts in places.items() if sign in texts] for sign in syntax.signs
    }
    return {sign: " and ".join(where) for sign, where in found.items() if where}


def _look_at_text(report: ModelReport, table: PhaseTable, asked: str) -> None:
    """Render and label a session, and note what of it is not as it should be."""
    codec, syntax = table.codec, table.syntax
    if not codec.template:
        report.refused.append("chat: the model has no chat template")
        return
    try:
        refuse_tools_without_syntax(syntax, asked)
    except UsageError as error:
        report.refused.append(f"tools: {error}")
        table = PhaseTable(table.family, codec, SYNTAXES["json"])
    template = template_of(codec.tokenizer, table)
    checks = {"calls": 1, "parallel calls": 2}
    report.checks = {
        name: _checked(template, table.syntax, calls) for name, calls in checks.items()
    }
    report.checks["turn end"] = _turn_end(report, table)
    try:
        text = template.render_first(sample_session(table.syntax), [TOOL])
    except UsageError as error:
        report.checks["phases"] = str(error)
        return
    report.session = labelled(table, text)
    report.checks["phases"] = _phases(report)
    report.refused += [
        f"{name}: {found}"
        for name, found in report.checks.items()
        if found not in (OK, NOT_SHOWN) and name != "turn end"
    ]


def template_of(tokenizer: Any, table: PhaseTable) -> ChatTemplate:
    family = table.family
    return ChatTemplate(tokenizer, table.syntax, (*family.opens, *family.closes))


def _checked(template: ChatTemplate, syntax: ToolSyntax, calls: int) -> str:
    try:
        return check_turns(template, syntax, calls)
    except KVBenchError as error:
        return str(error)


def _calls(syntax: ToolSyntax, count: int) -> tuple[Message, list[Message]]:
    """Return a message with calls, and their results."""
    cities = ("Oslo", "Rome")[:count]
    made = [
        tool_call(syntax.call_ids.format(number), "get_weather", {"city": city})
        for number, city in enumerate(cities, start=1)
    ]
    said = {"role": "assistant", "content": "", "tool_calls": made}
    results = [
        {"role": "tool", "tool_call_id": each["id"], "name": "get_weather", "content": RESULT}
        for each in made
    ]
    return said, list(results)


def check_turns(template: ChatTemplate, syntax: ToolSyntax, calls: int = 1) -> str:
    """Return `ok` if what the gateway adds each turn is the end of the whole, else what is wrong.

    A conversation with calls, their results and a last question is rendered at once and turn by
    turn. UsageError if the template refuses it.
    """
    said, back = _calls(syntax, calls)
    whole = template.render_first([ASKED, said, *back], [TOOL])
    delta = template.render_delta(back, [TOOL], said)
    if delta.count(RESULT) != calls:
        return "the results are not shown"
    if not whole.endswith(delta):
        return "a result is rendered otherwise later"
    answer = whole.removesuffix(delta).rpartition(str(ASKED["content"]))[2]
    if "get_weather" not in answer:
        return "the call is not shown"
    answered = {"role": "assistant", "content": ANSWER}
    again = {"role": "user", "content": "And Rome?"}
    delta = template.render_delta([again], [TOOL], answered)
    whole = template.render_first([ASKED, answered, again], [TOOL])
    return OK if whole.endswith(delta) else "a question is rendered otherwise later"


def sample_session(syntax: ToolSyntax) -> list[Message]:
    """Return a conversation in which every phase occurs."""
    said, back = _calls(syntax, 1)
    system = {"role": "system", "content": "You are a helpful assistant."}
    thought = {**said, "reasoning_content": THOUGHT, "thinking": THOUGHT}
    return [system, ASKED, thought, *back, {"role": "assistant", "content": ANSWER}]


def labelled(table: PhaseTable, text: str) -> list[tuple[str, str]]:
    """Return the runs of one phase that a text consists of: phase and text."""
    tokens = table.codec.encode(text)
    runs: list[tuple[str, list[int]]] = []
    for token, phase in zip(tokens, PhaseMachine(table).label_many(tokens), strict=True):
        name = phase.name.lower()
        if not runs or runs[-1][0] != name:
            runs.append((name, []))
        runs[-1][1].append(token)
    return [(name, table.codec.decode(ids)) for name, ids in runs]


def _phases(report: ModelReport) -> str:
    """Return what of the sample session has another phase than it should."""
    if report.phase_family == PLAIN.name:
        return "the chat format is none that is known: all tokens are others"
    found = {
        name: {phase for phase, said in report.session if text in said}
        for name, text in _PARTS.items()
    }
    # Tools are described in the system prompt, too.
    wrong = [
        f"{name} is {' and '.join(sorted(phases))}"
        for name, phases in found.items()
        if phases and name not in phases
    ]
    if wrong:
        return ", ".join(wrong)
    missing = [name for name, phases in found.items() if not phases]
    return NOT_SHOWN if "think" in missing else OK


def _turn_end(report: ModelReport, table: PhaseTable) -> str:
    """Say whether a token that ends the model's message stops it."""
    ends = table.family.closes
    if not ends or any(text in ends for text in report.stop_tokens.values()):
        return OK
    return f"none of {', '.join(ends)} is a stop token: answers may run on to the token limit"
