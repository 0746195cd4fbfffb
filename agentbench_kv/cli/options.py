"""How the verbs declare options, the options several share, and `kvbench completion`.

Light, because every verb loads it.
"""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.shell_completion import get_completion_class

from agentbench_kv.budget import Budget
from agentbench_kv.errors import UsageError

if TYPE_CHECKING:
    from agentbench_kv.run.spec import RunSpec


F = TypeVar("F", bound=Callable[..., Any])
PATH = click.Path(path_type=Path)
FILE = click.Path(dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
NATURAL = click.IntRange(0)
POSITIVE = click.IntRange(1)
ABOVE_ZERO = click.FloatRange(0, min_open=True)
_LARGEST = 2**63 - 1


class Option(click.Option):
    """An option that an environment variable can set too: KVBENCH_ and the option's name.

    `envvar` names another variable; None takes it away. A default is shown unless it is empty; a
    tuple means that the option is repeatable. Numbers are finite and have at most 64 bits.
    """

    def __init__(self, param_decls: Sequence[str], **settings: Any) -> None:
        name = next(text for text in param_decls if text.startswith("--")).split("/")[0]
        settings.setdefault("envvar", "KVBENCH_" + name[2:].upper().replace("-", "_"))
        settings.setdefault("multiple", isinstance(settings.get("default"), tuple))
        settings.setdefault("show_default", settings.get("default") not in (None, ""))
        super().__init__(param_decls, **settings)

    def type_cast_value(self, ctx: click.Context, value: Any) -> Any:
        found = super().type_cast_value(ctx, value)
        for each in found if isinstance(found, tuple) else (found,):
            if isinstance(each, int | float) and not abs(each) <= _LARGEST:
                shown = f"{value}"[:40]
                raise click.BadParameter(f"{shown} is no number of 64 bits.", ctx, self)
        return found


def option(
    names: str, help_text: str | None = None, kind: Any = None, **settings: Any
) -> Callable[[F], F]:
    """Declare an `Option`; `names` are written as in its help: `--quiet -q`, `--set KEY=VALUE`.

    A word in lower case is what the command calls the option: `--budget budgets TOKENS`. Without
    `kind`, the type is that of the default.
    """
    words = names.split()
    metavars = [word for word in words if word == word.upper() and not word.startswith("-")]
    names_only = [word for word in words if word not in metavars]
    settings |= {"metavar": metavars[0]} if metavars else {}
    return click.option(*names_only, cls=Option, help=help_text, type=kind, **settings)


flag = partial(option, is_flag=True)
many = partial(option, multiple=True)
local = partial(option, envvar=None)  # the command line alone can set it
local_flag = partial(flag, envvar=None)
shown = partial(option, show_envvar=True)  # the help names the variable
json_option = flag("--json as_json", "One JSON document.")
quiet_option = flag("--quiet -q", "Show no progress.")
dry_run_option = local_flag("--dry-run", "Check everything, show what would run, and stop.")
engine_option = option("--engine", default="embedded")
model_option = option(
    "--model",
    "The shipped micro model, a Hugging Face model folder, or a GGUF file (embedded, llamacpp).",
    default="micro",
)
dtype_option = option(
    "--dtype",
    "Of weights, activations and cached rows: float32, bfloat16 or float16 (on llamacpp with flash "
    "attention).",
    default="float32",
)
kv_dtype_option = option(
    "--kv-dtype",
    "Precision of cached rows: int8, int4, fp8, kivi4, kivi2 (embedded, simulated), fp8, int8, "
    "int4 (vllm), fp8_e4m3, fp8_e5m2 (vllm, sglang), q8_0, q4_0 (llamacpp).  [default: that of "
    "--dtype]",
    default="",
    show_default=False,
)
device_option = option(
    "--device", "auto (a GPU if PyTorch sees one), cpu, cuda or cuda:N.", default="auto"
)


def out_option(help_text: str = "Folder of runs.", **settings: Any) -> Callable[[F], F]:
    """Declare `--out`, the folder of runs."""
    return option("--out", help_text, FOLDER, default=Path("runs"), **settings)


def set_option(help_text: str, **settings: Any) -> Callable[[F], F]:
    """Declare `--set`, which the command gets as `pairs`, see `parse_settings`."""
    return many("--set pairs KEY=VALUE", help_text, **settings)


def address_options(port: int) -> Callable[[F], F]:
    """Add `--host` and `--port` to a command that listens, by default on the loopback only."""
    host_option = option("--host", default="127.0.0.1")
    port_option = option("--port", kind=click.IntRange(0, 65535), default=port)
    return lambda command: host_option(port_option(command))


def parse_settings(pairs: Iterable[str], option: str = "--set") -> dict[str, str]:
    """Turn `key=value` texts of an option into a dict; what is none is a `UsageError`."""
    settings: dict[str, str] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key:
            raise UsageError(f"{option} {pair!r}: expected key=value, e.g. {option} window=16")
        if key in settings:
            raise UsageError(f"{option} {key} is given twice")
        settings[key.strip()] = value.strip()
    return settings


def parse_budget(text: str | None) -> Budget | None:
    """Read a budget: tokens (`3072`, `3k`), or a share of the logical length (`25%`)."""
    return None if text is None else Budget.parse(text)


ENGINE_ARG_HELP = (
    "Option of a serving engine's own command line, without dashes (vllm, sglang), or cells=N "
    "and flash-attention=on (llamacpp); repeatable."
)
engine_arg_option = many("--engine-arg engine_args NAME=VALUE", ENGINE_ARG_HELP)
tool_syntax_option = option(
    "--tool-syntax",
    "How the model writes calls: harmony, kimi, deepseek, mistral, pythonic, llama3_json, glm, "
    "seed_oss, minimax, cohere, lfm2, granite, qwen3_coder, hermes, json (explained to any model) "
    "or none; auto: as chat template and vocabulary show.",
    default="auto",
)
context_limit_option = option(
    "--context-limit TOKENS",
    "Tokens a session may have: fewer than the model was trained for, or more by YaRN (Qwen 2.5 "
    "and 3, 4 times at most).",
    POSITIVE,
)
max_live_option = option(
    "--max-live-tokens TOKENS",
    "Tokens in the KV cache at once, over all sessions. [default: what half of the free memory "
    "holds, or the server's own choice]",
    POSITIVE,
)
untested_option = flag(
    "--allow-untested-engine allow_untested",
    "Go on with a version of the engine that the adapter was not tested with.",
)
banks_option = shown(
    "--banks FOLDER",
    "Where what a memory reads of the past is kept in files, and found by later runs (memart).",
    FOLDER,
)
SPEC_OPTIONS = {
    "engine": engine_option,
    "model": model_option,
    "limit": option("--limit", "Only the first N samples; another N is another run.", int),
    "trials": option("--trials", default=1),
    "concurrency": option(
        "--concurrency", "Sessions driven at once. [default: 16; llamacpp 1]", int
    ),
    "temperature": option("--temperature", default=0.0, show_default=False),
    "max_tokens": option("--max-tokens", default=1024, show_default=False),
    "timeout": option("--timeout", "Seconds per trial.", default=3600.0, show_default=False),
    "dtype": dtype_option,
    "kv_dtype": kv_dtype_option,
    "device": device_option,
    "context_limit": context_limit_option,
    "max_live_tokens": max_live_option,
    "engine_args": engine_arg_option,
    "tool_syntax": tool_syntax_option,
    "allow_untested": untested_option,
}


def spec_options(command: F) -> F:
    """Add the options; the command gets them as one dict called `shared`, see `base_spec`."""

    @functools.wraps(command)
    def gathered(**options: Any) -> Any:
        shared = {name: options.pop(name) for name in SPEC_OPTIONS}
        return command(shared=shared, **options)

    for declare in reversed(SPEC_OPTIONS.values()):
        gathered = declare(gathered)
    return gathered  # type: ignore[return-value]


def check_banks(ctx: click.Context, specs: Sequence[RunSpec], banks: Path | None) -> None:
    """Refuse `--banks` where no method keeps any: UsageError.

    The environment's folder is for those runs that have a use for it.
    """
    from agentbench_kv.run import memories

    if banks is not None and ctx.get_parameter_source("banks") is ParameterSource.COMMANDLINE:
        memories.check_banks(specs, banks)


GRID_OPTIONS = (
    shown(
        "--method methods",
        "Method or method@preset, with settings of its own if any (agentkv,pool=max); repeatable. "
        "[default: agentkv; full without a budget, or on an engine that cannot compress]",
        multiple=True,
    ),
    shown(
        "--budget budgets TOKENS",
        "Kept per (layer, KV head): tokens (3072, 3k) or share of the session (25%); repeatable.",
        multiple=True,
    ),
    option(
        "--task tasks",
        "Benchmark slice; repeatable. See kvbench ls tasks.",
        default=("micro/recall-5k",),
    ),
    option("--seed seeds", "Repeatable.", default=(0,)),
    set_option("Parameter of the method or the task; repeatable. See kvbench ls methods|tasks."),
)


def grid_options(command: F) -> F:
    """Add the options that make a grid of runs."""
    for declare in reversed(GRID_OPTIONS):
        command = declare(command)
    return command


def base_spec(
    shared: dict[str, Any],
    method: str = "",
    budget: str | None = None,
    task: str = "",
    seed: int = 0,
) -> RunSpec:
    """Return the spec all runs of a command share; what is not named is to be filled in."""
    from agentbench_kv.run.spec import unresolved

    plain = {**shared, "engine_args": parse_settings(shared["engine_args"], "--engine-arg")}
    plain |= {"timeout_s": plain.pop("timeout"), "task": task, "seed": seed}
    return unresolved(method=method, budget=parse_budget(budget), **plain)


def _finite(document: Any) -> Any:
    """Replace numbers that JSON does not have, such as an interval without an end, by null."""
    if isinstance(document, dict):
        return {key: _finite(value) for key, value in document.items()}
    if isinstance(document, list | tuple):
        return [_finite(each) for each in document]
    return None if isinstance(document, float) and not math.isfinite(document) else document


def print_json(document: Any) -> None:
    """Print one JSON document on stdout, text outside ASCII as it is where that can be written."""
    whole = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    json.dump(_finite(document), sys.stdout, indent=2, ensure_ascii=not whole, allow_nan=False)
    sys.stdout.write("\n")


SHELLS = ("bash", "zsh", "fish")


@click.command()
@click.argument("shell", type=click.Choice(SHELLS))
def completion(shell: str) -> None:
    """Print the completion script of SHELL.

    For bash: add `eval "$(kvbench completion bash)"` to ~/.bashrc.
    """
    from agentbench_kv.cli import kvbench

    cls = get_completion_class(shell)
    if cls is not None:
        click.echo(cls(kvbench, {}, "kvbench", "_KVBENCH_COMPLETE").source())
