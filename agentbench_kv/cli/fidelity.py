"""`kvbench fidelity`: how far a method's predictions are from the full cache's."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from agentbench_kv.budget import Budget
from agentbench_kv.cli import options as opt
from agentbench_kv.cli.recorded import like_run

if TYPE_CHECKING:
    from agentbench_kv.run.recordings import Recording


@click.command()
@opt.many(
    "--method methods METHOD",
    "Method or method@preset, with settings of its own if any (agentkv,pool=max); repeatable.",
    required=True,
)
@opt.many("--budget budgets TOKENS", "As kvbench run takes it; repeatable.")
@opt.many(
    "--kv-dtype kv_dtypes",
    "Precision that the methods' rows are simulated at: int8, int4, fp8, kivi4, kivi2, or auto; "
    "repeatable.",
    envvar=None,
)
@opt.option("--task", "Play this task's golden sessions.", default="", show_default=False)
@opt.shown(
    "--from source RUN",
    "Play the sessions of this run instead, or those of a file: a JSON object with messages and "
    "tools a line.",
    opt.PATH,
    envvar=None,
)
@opt.option("--model", "The shipped micro model, or a Hugging Face model folder.", default="micro")
@opt.shown("--limit", "Only the first N sessions.", opt.POSITIVE)
@opt.option(
    "--dtype",
    "[default: float32; with --from RUN the run's]",
    default="float32",
    show_default=False,
)
@opt.option("--device", default="auto")
@opt.option("--tool-syntax", "How the golden sessions' calls are read.", default="auto")
@opt.set_option("Parameter of the methods, or setting of the task (route=chat); repeatable.")
@opt.shown(
    "--save-tokens", "Keep the figures of every token of the sessions played now.", is_flag=True
)
@opt.out_option()
@opt.quiet_option
@opt.json_option
def fidelity(
    methods: tuple[str, ...],
    budgets: tuple[str, ...],
    kv_dtypes: tuple[str, ...],
    pairs: tuple[str, ...],
    out: Path,
    quiet: bool,
    as_json: bool,
    **asked: Any,
) -> None:
    """Play recorded sessions with METHOD at BUDGET beside the full cache, and compare predictions.

    Every token of an answer is fed as if the model had written it. KL is that of the next token's
    distribution, full cache over METHOD's, in nats; 0 is the full cache. The same command finishes
    what was interrupted.
    """
    from agentbench_kv.cli.interrupts import interruptible
    from agentbench_kv.errors import UsageError
    from agentbench_kv.registry import load_task
    from agentbench_kv.results.fidelity import divergence
    from agentbench_kv.results.runs import RunGroup, load_run
    from agentbench_kv.results.store import RunStore
    from agentbench_kv.results.tables.fidelity import fidelity_tables
    from agentbench_kv.results.tables.formats import show
    from agentbench_kv.run.fidelity import fidelity_arms, one_run, play_fidelity
    from agentbench_kv.run.selfcheck import self_check

    if bool(asked["task"]) == bool(asked["source"]):
        raise UsageError("name the sessions: --task TASK, --from RUN, or --from FILE.jsonl")
    settings = opt.parse_settings(pairs)
    of_task = set(load_task(asked["task"]).parameters()) if asked["task"] else set()
    own = {key: value for key, value in settings.items() if key not in of_task}
    precisions = [name.replace("auto", "") for name in dict.fromkeys(kv_dtypes)] or [""]
    arms = fidelity_arms(methods, [Budget.parse(text) for text in budgets], own, precisions)
    with interruptible():
        of_run = asked["source"] and asked["source"].is_dir()
        like = None
        if of_run:
            asked["source"] = one_run(asked["source"])
            like = like_run(asked["source"], asked)
        chosen = {key: value for key, value in settings.items() if key in of_task}
        recordings, label, model = _recorded(asked, chosen)
        given = (arm.spec(model, label, asked["dtype"], asked["device"], like) for arm in arms)
        specs = list({spec.id: spec for spec in given}.values())
        told = _say if not quiet else lambda *_: None
        # In less than float32 a run's own tokens come back only if they are fed as it drew them.
        by_token = bool(of_run) and asked["dtype"] != "float32"
        about = {"sessions": label, "fed": "token by token" if by_token else "in stretches"}
        play_fidelity(specs, recordings, out, about, told, asked["save_tokens"], by_token)
    folders = [RunStore(out).find(spec.id) for spec in specs]
    for line in self_check(asked["source"], folders) if of_run else ():
        click.echo(line, err=True)
    runs = [load_run(folder.path) for folder in folders]
    if as_json:
        found = [divergence(RunGroup(run.label, (run,))) for run in runs]
        opt.print_json([asdict(each) for each in found if each is not None])
    else:
        show(fidelity_tables(runs), "terminal")


def _recorded(asked: dict[str, Any], chosen: dict[str, str]) -> tuple[list[Recording], str, str]:
    """Return the sessions, what they are called, and the model whose tokens they are."""
    from agentbench_kv.adapters.probe.session import read_sessions, refuse_repeated
    from agentbench_kv.run.fidelity import GOLD
    from agentbench_kv.run.recordings import record_file, record_gold, record_run

    source, model, limit, syntax = (asked[k] for k in ("source", "model", "limit", "tool_syntax"))
    if source and not source.is_dir():
        refuse_repeated(source, (each for each in read_sessions(source) if each.answers))
        return record_file(source, model, limit, syntax), f"file/{source.stem}", model
    if source:
        found = record_run(source, limit)
        return found.recordings, f"run/{source.resolve().name}", found.model
    task = asked["task"]
    return record_gold(task, model, limit, chosen, syntax), task + GOLD, model


def _say(session: str, done: int, total: int) -> None:
    click.echo(f"{done}/{total} sessions; playing {session}", err=True)
