"""How well models name expired tool results on micro sessions, and what they hold over a session.

    python benchmarks/sidequest_micro.py named micro quest/model --limit 60
    python benchmarks/sidequest_micro.py curve runs/FULL runs/QUEST --plot docs/sidequest-micro.svg

`named` asks every model at each fourth request of the golden sessions of seed 0. A result is
expired if no later call or answer uses it. Some of that nobody can know in advance: an item that is
never shipped looks like one that will be. So recall is also given over what the depot's rules tell
at that moment (`told`), which never ask how sessions went on; precision is over what was never used
again. What it names wrongly is listed. `curve` draws live tokens at each request, the mean over a
run's sessions that got so far.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from agentbench_kv.adapters.micro.episode import Episode, cursors
from agentbench_kv.adapters.micro.generate import PROFILES, generate
from agentbench_kv.adapters.probe.session import ChatSession
from agentbench_kv.engines.embedded.model import model_path
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer
from agentbench_kv.results.run_reader import RunReader, turns_by_index
from agentbench_kv.results.stats import Scores, level
from agentbench_kv.run.recordings import gold_source
from agentbench_kv.run.traces import TraceCounts, trace_rows
from agentbench_kv.training.sidequest.annotation import ExpiryQuestion, by_rule
from agentbench_kv.training.sidequest.judge import answers
from agentbench_kv.training.sidequest.rows import SideQuestRow

Asked = tuple[SideQuestRow, list[set[int]]]  # a session, and what the rules tell at each question


def told(episode: Episode, session: ChatSession, read: int) -> set[int]:
    """Return the results that the rules call stale after the user turns that are over by then."""
    users = sum(message["role"] == "user" for message in session.messages[:read])
    return {c.number for c in cursors(episode, users - 1) if c.stale}


def asked(task: str, limit: int, every: int) -> Iterator[Asked]:
    """Yield golden sessions with their questions, and of each what the rules tell is expired."""
    profile = PROFILES[task.removeprefix("micro/")]
    questions: list[ExpiryQuestion] = []

    def annotate(question: ExpiryQuestion) -> str:
        questions.append(question)
        return by_rule(question)

    with gold_source(task, "micro", limit, {}) as source:
        for row in trace_rows([source], every, annotate, 0, TraceCounts()):
            episode = generate(int(row.sample.rpartition("-")[2]), profile)
            own = [q for q in questions if q.session.id == row.sample]
            known = [told(episode, q.session, q.read) & {use.cursor for use in q.open} for q in own]
            yield row, known


def named(models: list[str], task: str, limit: int, every: int) -> None:
    rows = list(asked(task, limit, every))
    codec = TokenCodec(load_tokenizer(model_path("micro")))
    ends = {int(codec.tokenizer.eos_token_id)}
    print(f"{task}, {len(rows)} sessions, {sum(len(row.forks) for row, _ in rows)} questions\n")
    print("| model | told and named | expired and named | named and expired | unreadable |")
    print("|---|---|---|---|--:|")
    slips = []
    for model in models:
        network = AutoModelForCausalLM.from_pretrained(model_path(model)).eval()
        parts: dict[str, dict[str, tuple[float, float]]] = defaultdict(dict)
        unreadable, wrong = 0, []
        said = answers(network, [row for row, _ in rows], codec.decode, ends)
        for row, known in rows:
            for fork, rules in zip(row.forks, known, strict=True):
                cursors_named = next(said)
                unreadable += cursors_named is None
                found, over = set(cursors_named or ()) & set(fork.open), set(fork.expired)
                for name, truth in {"told": rules, "expired": over}.items():
                    _add(parts[name], row.sample, len(found & truth), len(truth))
                _add(parts["right"], row.sample, len(found & over), len(found))
                wrong += [f"{row.sample}@{fork.at}: {cursor}" for cursor in sorted(found - over)]
        cells = [_share(parts[name]) for name in ("told", "expired", "right")]
        print(f"| {Path(model).parent.name or model} | {' | '.join(cells)} | {unreadable} |")
        slips.append(f"{model} names what is needed later: {', '.join(wrong) or 'nothing'}")
    print("", *slips, sep="\n")


def _add(counts: dict[str, tuple[float, float]], sample: str, right: int, of: int) -> None:
    before = counts.get(sample, (0, 0))
    counts[sample] = (before[0] + right, before[1] + of)


def _share(counts: dict[str, tuple[float, float]]) -> str:
    scores = Scores.of_counts({key: value for key, value in counts.items() if value[1]})
    if not scores.parts:
        return "-"
    found = level(scores)
    right, of = (sum(each[i] for each in counts.values()) for i in range(2))
    return f"{found.point:.1%} [{found.low:.1%}, {found.high:.1%}] ({right:g} of {of:g})"


def curve(folders: list[Path], plot: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 3.6), layout="constrained")
    for folder in folders:
        reader = RunReader(folder)
        spec = reader.info.spec
        label = str(spec["method"])
        groups = turns_by_index(reader.turns())
        means = [sum(turn.live_after for turn in group) / len(group) for group in groups]
        size = token_megabytes(reader)
        axes.plot(range(1, len(means) + 1), [mean * size for mean in means], label=label)
        print(f"{label}: mean of live MB (tokens) behind each request, {len(groups[0])} sessions")
        print("  " + " ".join(f"{mean * size:.2f} ({mean:.0f})" for mean in means))
    axes.set(xlabel="request", ylabel="live MB of a session", ylim=(0, None))
    axes.legend(frameon=False)
    figure.savefig(plot)


def token_megabytes(reader: RunReader) -> float:
    """Return the megabytes of a live token, which are the same in all sessions of a run."""
    accounts = [trial.kv for trial in reader.trials() if trial.kv.peak_live]
    return sum(kv.peak_bytes for kv in accounts) / sum(kv.peak_live for kv in accounts) / 1e6


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    verbs = options.add_subparsers(dest="verb", required=True)
    naming = verbs.add_parser("named")
    naming.add_argument("models", nargs="+")
    naming.add_argument("--task", default="micro/recall-1k")
    naming.add_argument("--limit", type=int, default=60)
    naming.add_argument("--every", type=int, default=4)
    drawing = verbs.add_parser("curve")
    drawing.add_argument("runs", nargs="+", type=Path)
    drawing.add_argument("--plot", type=Path, required=True)
    given: Any = options.parse_args()
    if given.verb == "named":
        named(given.models, given.task, given.limit, given.every)
    else:
        curve(given.runs, given.plot)


if __name__ == "__main__":
    main()
