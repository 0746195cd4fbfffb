"""The tables and plots of docs/real-model-results.md, from records that outlive their machine.

    python benchmarks/real_model_tables.py pack RUNS... --out RECORDS.jsonl.xz   # fidelity runs,
                                                             # and RECORDS that they are added to
    python benchmarks/real_model_tables.py fidelity RECORDS.jsonl.xz [--base METHOD] [--plot SVG]
    python benchmarks/real_model_tables.py matrix RECORDS.jsonl.xz   # KL by method and budget
    python benchmarks/real_model_tables.py contrasts RECORDS.jsonl.xz 'CAND=>BASE' ...
    python benchmarks/real_model_tables.py steady RECORDS.jsonl.xz
    python benchmarks/real_model_tables.py probes PROBES.jsonl.xz [--against RECORDS.jsonl.xz]
    python benchmarks/real_model_tables.py keep LINES.jsonl --out LOCOMO.jsonl.xz
    python benchmarks/real_model_tables.py locomo LOCOMO.jsonl.xz
    python benchmarks/real_model_tables.py keep RUN --out TASK.jsonl.xz   # a run of a task
    python benchmarks/real_model_tables.py ends TASK.jsonl.xz

A line of RECORDS is one session of one arm: sums and counts over its tokens, as `kvbench fidelity`
records them, without turns and distances. One of PROBES is what `real_probes.py` writes, one of
LOCOMO what `real_locomo.py` does, without the answers. One of TASK is how a trial of a run ended.
"""

from __future__ import annotations

import argparse
import json
import lzma
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from divergence_predicts import Arm, correlation, estimate

from agentbench_kv.results.runs import load_run
from agentbench_kv.results.stats import Interval, Scores, holm, level, open_change, open_level
from agentbench_kv.results.validity import RunState

Counts = dict[str, tuple[float, float]]  # a figure's sum and count in each session
FIGURES = (
    *("kl", "kl_value", "kl_template", "kl_text", "kl_think", "kl_act", "kl_others"),
    *("dnll", "dnll_value", "top1", "top1_value", "flips", "right"),
    *("calls_exact", "calls_exact_full"),
)
_PARTS = ("value", "template", "text", "think", "act", "others")
_VERBS = ("pack", "fidelity", "matrix", "contrasts", "steady", "probes", "keep", "locomo", "ends")
_OF_A_TRIAL = ("turns", "steps", "calls", "refused_calls", "unparsable_calls", "error_type")
_PAIRS = (("_total", "_count"), ("_right", "_asked"))


@dataclass(frozen=True)
class Played:
    """An arm: a method with its settings at a budget."""

    method: str
    budget: int  # 0: the full cache
    figures: Mapping[str, Counts]
    events: Mapping[str, int]

    def on(self, sessions: set[str]) -> Played:
        """Return the arm on some of its sessions."""
        figures = {
            name: {each: pair for each, pair in counts.items() if each in sessions}
            for name, counts in self.figures.items()
        }
        events = {each: n for each, n in self.events.items() if each in sessions}
        return Played(self.method, self.budget, figures, events)


# --- records


def packed(sources: Sequence[Path], same: Mapping[str, str] | None = None) -> list[dict[str, Any]]:
    """Return the sessions of fidelity runs and of records, each of an arm once.

    `same` names another hash for a model's: it covers `config.json`, in which a version stands.
    """
    found: dict[tuple[str, str, int], dict[str, Any]] = {}
    for source in sources:
        for row in lines(source) if source.is_file() else _of_runs([source]):
            row["model"] = (same or {}).get(row["model"], row["model"])
            found.setdefault((row["session"], row["method"], row["budget"]), row)
    rows = list(found.values())
    for name in ("model", "dtype"):
        if len(known := {row[name] for row in rows}) > 1:
            raise SystemExit(f"records of more than one {name}: {', '.join(sorted(known))}")
    played = {(row["session"], row["sha"]) for row in rows}
    if len(played) > len({session for session, _ in played}):
        raise SystemExit("a session's tokens differ from arm to arm")
    return rows


def _of_runs(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield the sessions of fidelity runs, arm by arm."""
    for path in sorted(found for folder in folders for found in folder.glob("**/samples.jsonl")):
        run = json.loads((path.parent / "run.json").read_text())
        state = load_run(path.parent).summary.validity.state
        if state not in (RunState.VALID, RunState.INCOMPLETE):
            raise SystemExit(f"{path.parent} is {state.value}: leave it out")
        spec, changed = run["spec"], run["provenance"]["changed_settings"]
        for line in path.read_text().splitlines():
            trial = json.loads(line)
            if trial["status"] != "scored":
                raise SystemExit(f"{path}: session {trial['sample_id']} is {trial['status']}")
            yield {
                "session": trial["sample_id"], "method": named(spec["method"], changed),
                "budget": spec["budget"] or 0, "task": spec["task"], "dtype": spec["dtype"],
                "model": run["provenance"]["model_sha"][:16], "sha": trial["prompt_sha"][:16],
                "events": trial["kv"]["events"], "live": trial["kv"]["peak_live"],
                "sums": sums(trial["metrics"]),
            }  # fmt: skip


def named(method: str, changed: Mapping[str, Any]) -> str:
    """Return a method with the settings that are its own and no default."""
    own = [f"{key}={value}" for key, value in changed.items() if key != "trigger"]
    # An older name of the same setting, which runs keep in their records.
    return " ".join([method, *own]).replace("keep_prompt=off", "protect=none")


def sums(metrics: Mapping[str, float]) -> dict[str, list[float]]:
    """Return the sums and counts that tables need."""
    found = {}
    for name in FIGURES:
        for total, count in _PAIRS:
            if f"{name}{total}" in metrics:
                value = metrics[f"{name}{total}"]
                found[name] = [float(f"{value:.6g}"), int(metrics[f"{name}{count}"])]
    return found


def kept_run(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield how the trials of a task's run ended, without what was said."""
    for line in (folder / "samples.jsonl").read_text().splitlines():
        trial = json.loads(line)
        told = {key: trial["metrics"].get(key) for key in _OF_A_TRIAL}
        account = {key: trial["kv"][key] for key in ("logical", "decode_tokens", "cached_tokens")}
        yield {"sample": trial["sample_id"], "status": trial["status"], "score": trial["score"],
               **told, **account}  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    with lzma.open(path, "wt", encoding="utf-8", preset=9) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def arms(
    path: Path, least: int = 0, without: Sequence[str] = (), budgets: Sequence[int] = ()
) -> list[Played]:
    """Read the arms of so many sessions at least, on those sessions that all of them have.

    Of some budgets only, if any are given; full has none.
    """
    found = [
        arm
        for arm in all_arms(path)
        if len(arm.events) >= least
        and not any(word in arm.method for word in without)
        and (not budgets or arm.budget in (0, *budgets))
    ]
    shared = set.intersection(*(set(arm.events) for arm in found))
    if not shared:
        raise SystemExit("no session is in all arms: --without NAME or --least N leave some out")
    return [arm.on(shared) for arm in found]


def all_arms(path: Path) -> list[Played]:
    """Read the arms, each with all of its sessions."""
    found: dict[tuple[str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in lines(path):
        found[row["method"], row["budget"]].append(row)
    return [
        Played(
            *key,
            {
                name: {
                    row["session"]: (row["sums"][name][0], row["sums"][name][1])
                    for row in rows
                    if name in row["sums"]
                }
                for name in FIGURES
            },
            {row["session"]: row["events"] for row in rows},
        )
        for key, rows in found.items()
    ]


# --- tables


def mean(counts: Counts) -> float:
    return sum(t for t, _ in counts.values()) / sum(n for _, n in counts.values())


def shown(interval: Interval, digits: int = 3, times: float = 1) -> str:
    ends = interval.point, interval.low, interval.high
    point, low, high = (f"{times * each:.{digits}f}" for each in ends)
    return f"{point} [{low}, {high}]"


def share(counts: Counts) -> Interval:
    """Return the interval of a share of a session's answers, sessions being what is drawn."""
    return level(Scores(counts, {name: number for name, (_, number) in counts.items()}))


def fidelity(found: Sequence[Played], base: str, digits: int) -> Iterator[str]:
    """Yield a table: every arm with intervals, and its difference to `base`, paired by session."""
    yield (
        "| budget | method | events | KL | KL of values | same best token, % "
        f"| calls as recorded, % | KL less {base}'s | p (Holm) |"
    )
    yield "|--:|---|--:|---|---|---|--:|---|--:|"
    for budget in sorted({arm.budget for arm in found}):
        rows = sorted((a for a in found if a.budget == budget), key=lambda a: mean(a.figures["kl"]))
        against = next((arm for arm in rows if arm.method == base), None)
        others = [arm for arm in rows if arm is not against and against is not None]
        told = [open_change(a.figures["kl"], against.figures["kl"]) for a in others if against]
        adjusted = iter(holm([each.p_value for each in told if each]))
        deltas = {id(a): each for a, each in zip(others, told, strict=True)}
        for arm in rows:
            change = deltas.get(id(arm))
            tail = "| | |"
            if change is not None:
                ends = f"[{change.low:+.{digits}f}, {change.high:+.{digits}f}]"
                tail = f"| {change.point:+.{digits}f} {ends} | {next(adjusted):.3f} |"
            yield f"| {budget or ''} | {arm.method} {_row(arm, digits)} {tail}"


def _row(arm: Played, digits: int) -> str:
    events = np.mean(list(arm.events.values()))
    same = shown(share(arm.figures["top1"]), 1, 100)
    calls = arm.figures["calls_exact"]
    return (
        f"| {events:.1f} | {shown(open_level(arm.figures['kl']), digits)} "
        f"| {shown(open_level(arm.figures['kl_value']), digits)} | {same} | {100 * mean(calls):.0f}"
    )


def matrix(found: Sequence[Played]) -> Iterator[str]:
    """Yield a row a method and a column a budget: KL, and KL of values behind it."""
    budgets = sorted({arm.budget for arm in found} - {0})
    by_name = {(arm.method, arm.budget): arm.figures for arm in found}
    most = [name for name, budget in by_name if budget == budgets[-1]]
    yield "| method | " + " | ".join(map(str, budgets)) + " |"
    yield "|---|" + "--:|" * len(budgets)
    for name in sorted(most, key=lambda each: mean(by_name[each, budgets[-1]]["kl"])):
        own = [by_name[name, budget] for budget in budgets]
        cells = [f"{mean(each['kl']):.3f} / {mean(each['kl_value']):.3f}" for each in own]
        yield f"| {name} | " + " | ".join(cells) + " |"


def parts(found: Sequence[Played], digits: int) -> Iterator[str]:
    """Yield a table of KL by kind of token and phase."""
    yield "| budget | method | " + " | ".join(_PARTS) + " |"
    yield "|--:|---|" + "--:|" * len(_PARTS)
    for arm in sorted(found, key=lambda a: (a.budget, mean(a.figures["kl"]))):
        columns = [arm.figures[f"kl_{part}"] for part in _PARTS]
        cells = [f"{mean(each):.{digits}f}" if each else "" for each in columns]
        yield f"| {arm.budget or ''} | {arm.method} | " + " | ".join(cells) + " |"


def alike(path: Path) -> dict[str, str]:
    """Group a file's sessions by their tools: nine names in ten are the same."""
    groups: list[tuple[str, set[str]]] = []
    found = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        session = json.loads(line)
        names = {tool["function"]["name"] for tool in session["tools"]}
        same = (first for first, known in groups if len(names & known) >= 0.9 * len(names | known))
        group = next(same, None)
        if group is None:
            group = session["id"]
            groups.append((group, names))
        found[session["id"]] = group
    return found


def contrasts(
    found: Sequence[Played],
    pairs: Sequence[str],
    figures: Sequence[str],
    budgets: Sequence[int],
    groups: Mapping[str, str] | None = None,
) -> Iterator[str]:
    """Yield CAND less BASE at the budgets, or all; p-values adjusted over the whole table.

    What is independent are the groups of sessions, if there are any.
    """
    by_name = {(arm.method, arm.budget): arm for arm in found}
    rows = []
    for cand, _, base in (pair.partition("=>") for pair in pairs):
        for budget in budgets or sorted({arm.budget for arm in found} - {0}):
            sides = by_name.get((cand, budget)), by_name.get((base, budget))
            if sides[0] is None or sides[1] is None:
                continue
            for figure in figures:
                mine, theirs = (side.figures[figure] for side in sides)
                change = open_change(mine, theirs, groups)
                if change is not None:
                    rows.append((cand, base, budget, figure, change))
    adjusted = holm([row[-1].p_value for row in rows])
    yield "| candidate | base | budget | figure | base's | difference | p | p (Holm) | units |"
    yield "|---|---|--:|---|--:|---|--:|--:|--:|"
    for (cand, base, budget, figure, change), p in zip(rows, adjusted, strict=True):
        yield (
            f"| {cand} | {base} | {budget} | {figure} | {change.base:.4f} | {change.point:+.4f} "
            f"[{change.low:+.4f}, {change.high:+.4f}] | {change.p_value:.4f} | {p:.3f} "
            f"| {change.groups or change.n} |"
        )


def steady(found: Sequence[Played], figure: str) -> Iterator[str]:
    """Yield who has the lowest figure at every budget, and how often if a session is left out."""
    yield "| budget | lowest | without one session | halves of the sessions |"
    yield "|--:|---|---|---|"
    for budget in sorted({arm.budget for arm in found} - {0}):
        rows = [arm for arm in found if arm.budget == budget]
        names = sorted(rows[0].figures[figure])

        def best(kept: Sequence[str], rows: Sequence[Played] = rows) -> str:
            return min(rows, key=lambda a: mean({k: a.figures[figure][k] for k in kept})).method

        without = [best([other for other in names if other != name]) for name in names]
        halves = [best(names[at::2]) for at in (0, 1)]
        yield f"| {budget} | {best(names)} | {_counted(without)} | {', '.join(halves)} |"


def _counted(names: Sequence[str]) -> str:
    told = {name: names.count(name) for name in names}
    return ", ".join(f"{name} {n}" for name, n in sorted(told.items(), key=lambda item: -item[1]))


# --- probes


def probe_arms(path: Path) -> dict[tuple[str, int], dict[str, dict[int, list[Any]]]]:
    """Return of every arm its sessions' questions: rank, phase, contains, exact, answer."""
    found: dict[tuple[str, int], dict[str, dict[int, list[Any]]]] = defaultdict(dict)
    for row in lines(path):
        settings = {k: v for k, v in row["settings"].items() if k != "trigger"}
        key = named(row["method"].partition(",")[0], settings), int(row["budget"] or 0)
        found[key][row["session"]] = {each[0]: each for each in row["asked"]}
    return dict(found)


def probe_counts(sessions: Mapping[str, Mapping[int, list[Any]]], column: int) -> Counts:
    return {
        name: (float(sum(each[column] for each in asked.values())), float(len(asked)))
        for name, asked in sessions.items()
        if asked
    }


def probes(path: Path) -> Iterator[str]:
    """Yield a table of probe scores; `removed` beside the full cache on the same questions."""
    found = probe_arms(path)
    full = found["full", 0]
    yield (
        "| budget | method | sessions | questions | contains, % | exact, % | less full | p (Holm) |"
    )
    yield "|--:|---|--:|--:|---|--:|---|--:|"
    rows = sorted(found.items(), key=lambda item: (item[0][1], -mean(probe_counts(item[1], 2))))
    same = {
        key: {s: {rank: full[s][rank] for rank in asked} for s, asked in sessions.items()}
        for key, sessions in rows
    }
    changes = {
        key: open_change(probe_counts(sessions, 2), probe_counts(same[key], 2))
        for key, sessions in rows
        if key != ("full", 0)
    }
    known = {key: change for key, change in changes.items() if change is not None}
    adjusted = dict(zip(known, holm([change.p_value for change in known.values()]), strict=True))
    for key, sessions in rows:
        counts = probe_counts(sessions, 2)
        told = "| |"
        if key in known:
            c = known[key]
            delta, low, high = (f"{100 * each:+.0f}" for each in (c.point, c.low, c.high))
            told = f"{delta} [{low}, {high}] | {adjusted[key]:.3f} |"
        asked = int(sum(n for _, n in counts.values()))
        exact = 100 * mean(probe_counts(sessions, 3))
        yield (
            f"| {key[1] or ''} | {key[0]} | {len(counts)} | {asked} "
            f"| {shown(share(counts), 0, 100)} | {exact:.0f} | {told}"
        )


# --- LoCoMo


def kept_locomo(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines that `real_locomo.py` wrote without answers, which quote the data."""
    for line in path.read_text("utf-8").splitlines():
        row = json.loads(line)
        yield row | {"asked": [each[:4] for each in row["asked"]]}


def locomo(path: Path) -> Iterator[str]:
    """Yield a table of F1, and its difference to the full cache's, paired by question.

    Questions are what is drawn: the intervals are of these conversations, not of others.
    """
    found = {
        key: {
            f"{session}:{index}": float(each[2])
            for session, asked in sessions.items()
            for index, each in asked.items()
        }
        for key, sessions in probe_arms(path).items()
    }
    full = found["full", 0]
    changes = {
        key: open_change(_ones(own), _ones(full)) for key, own in found.items() if own is not full
    }
    known = {key: change for key, change in changes.items() if change is not None}
    adjusted = dict(zip(known, holm([change.p_value for change in known.values()]), strict=True))
    yield "| budget | method | questions | F1, % | less full | p (Holm) |"
    yield "|--:|---|--:|---|--:|--:|"
    for key, own in sorted(
        found.items(), key=lambda item: (item[0][1], -np.mean(list(item[1].values())))
    ):
        level_of = shown(level(Scores(_ones(own))), 1, 100)
        told = "| |"
        if key in known:
            delta, low, high = (
                f"{100 * each:+.1f}" for each in (known[key].point, known[key].low, known[key].high)
            )
            told = f"{delta} [{low}, {high}] | {adjusted[key]:.3f} |"
        yield f"| {key[1] or ''} | {key[0]} | {len(own)} | {level_of} | {told}"


def _ones(values: Mapping[str, float]) -> Counts:
    return {name: (value, 1.0) for name, value in values.items()}


def predicts(path: Path, records: Path, figure: str, without: Sequence[str] = ()) -> Iterator[str]:
    """Yield how the probe scores of arms go with their divergence, by Spearman's correlation.

    Over all arms, and of ranks within each budget: more budget is better for both anyway.
    """
    scored = {
        key: probe_counts(own, 2)
        for key, own in probe_arms(path).items()
        if key[1] and not any(word in key[0] for word in without)
    }
    played = {(a.method, a.budget): a.figures[figure] for a in all_arms(records) if a.budget}
    both = sorted(scored.keys() & played.keys())
    samples = sorted(set.intersection(*(set(scored[key]) for key in both)))
    sessions = sorted(set.intersection(*(set(played[key]) for key in both)))
    pairs = [
        Arm(
            f"{key[0]} at {key[1]}", key[0], str(key[1]),
            np.array([scored[key][name] for name in samples]).T,
            np.array([played[key][name] for name in sessions]).T,
        )
        for key in both
    ]  # fmt: skip
    if len(pairs) < 3:
        return
    for over, groups in ("all", None), ("those of a budget", [arm.budget for arm in pairs]):
        told = estimate(pairs, partial(correlation, groups=groups))
        yield (
            f"Spearman of probe score and {figure}, {len(pairs)} arms, over {over}, "
            f"{len(samples)} and {len(sessions)} sessions: "
            f"{told[0]:.2f} [{told[1]:.2f}, {told[2]:.2f}]"
        )


def ends(path: Path) -> Iterator[str]:
    """Yield a table of how a task's sessions ended."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in lines(path):
        how = row["error_type"] or ("solved" if row["score"] == 1.0 else "")
        found[row["status"], str(how).rpartition(":")[2]].append(row)
    yield "| ended | why | sessions | answers | calls | refused | unreadable | tokens answered |"
    yield "|---|---|--:|--:|--:|--:|--:|--:|"
    columns = ("steps", "calls", "refused_calls", "unparsable_calls", "decode_tokens")
    for (status, how), rows in sorted(found.items(), key=lambda item: -len(item[1])):
        means = (f"{np.mean([row[name] or 0 for row in rows]):.1f}" for name in columns)
        yield f"| {status} | {how} | {len(rows)} | {' | '.join(means)} |"


# --- plots


def plot(found: Sequence[Played], out: Path, title: str) -> None:
    """Draw KL and KL of values against budget."""
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvbench", "font.size": 9})
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 4.2), layout="constrained", sharey=True)
    most = max(arm.budget for arm in found)
    largest = sorted(
        (arm for arm in found if arm.budget == most), key=lambda arm: mean(arm.figures["kl"])
    )
    names = [arm.method for arm in largest]
    for axis, name, told in zip(axes, ("kl", "kl_value"), ("all tokens", "values"), strict=True):
        for number, method in enumerate(names):
            own = sorted((a for a in found if a.method == method), key=lambda a: a.budget)
            levels = [open_level(a.figures[name]) for a in own]
            x = np.array([a.budget for a in own]) * (1 + 0.02 * (number - len(names) / 2))
            y = np.array([each.point for each in levels])
            reach = [y - [each.low for each in levels], [each.high for each in levels] - y]
            axis.errorbar(x, y, reach, label=method, color=f"C{number}", marker="o", ms=3, lw=1.2,
                          elinewidth=0.6, ls="--" if " " in method else "-")  # fmt: skip
        axis.set(xscale="log", yscale="log", xlabel="budget, tokens", title=told)
        axis.set_xticks(ticks := sorted({a.budget for a in found if a.budget}), map(str, ticks))
        axis.minorticks_off()
    axes[0].set_ylabel("KL(full || method), nats")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", frameon=False)
    figure.suptitle(title)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    """Do what was asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("verb", choices=_VERBS)
    parser.add_argument("path", type=Path)
    parser.add_argument("more", nargs="*")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--base", default="agentkv")
    parser.add_argument("--figure", action="append", default=[])
    parser.add_argument("--budget", action="append", type=int, default=[], help="only these")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--title", default="")
    parser.add_argument("--against", type=Path)
    parser.add_argument("--sessions", type=Path, help="of these those with the same tools are one")
    parser.add_argument("--least", type=int, default=0, help="leave out arms of fewer sessions")
    parser.add_argument("--digits", type=int, default=3, help="of divergences")
    parser.add_argument("--same", action="append", default=[], help="HASH=HASH of one model")
    parser.add_argument("--without", action="append", default=[], help="and those called so")
    given = parser.parse_args()
    figures = given.figure or ["kl", "kl_value"]
    if given.verb in ("pack", "keep"):
        sources = [given.path, *map(Path, given.more)]
        same = dict(each.split("=") for each in given.same)
        kept = kept_run if given.path.is_dir() else kept_locomo
        rows = list(packed(sources, same) if given.verb == "pack" else kept(given.path))
        write(given.out, rows)
        print(f"{len(rows)} records")
        return
    read = partial(arms, given.path, given.least, given.without, given.budget)
    verbs: dict[str, Callable[[], Iterator[str]]] = {
        "fidelity": lambda: chain(
            fidelity(read(), given.base, given.digits), [""], parts(read(), given.digits)
        ),
        "matrix": lambda: matrix(read()),
        "contrasts": lambda: contrasts(
            *(all_arms(given.path), given.more, figures, given.budget),
            alike(given.sessions) if given.sessions else None,
        ),
        "steady": lambda: iter(row for f in figures for row in (f, *steady(read(), f))),
        "probes": lambda: probes(given.path),
        "locomo": lambda: locomo(given.path),
        "ends": lambda: ends(given.path),
    }  # fmt: skip
    print(*verbs[given.verb](), sep="\n")
    if given.against is not None:
        told = (predicts(given.path, given.against, f, given.without) for f in figures)
        print(*chain.from_iterable(told), sep="\n")
    if given.plot is not None:
        plot(read(), given.plot, given.title)


if __name__ == "__main__":
    main()
