"""A comparison in words and tables: terminal, markdown, JUnit, GitHub annotations, JSON.

Names come from run directories, so every format escapes them in its own way.
"""

from __future__ import annotations

import json
import string
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from xml.etree import ElementTree

from agentbench_kv.errors import UsageError
from agentbench_kv.results.compare import Comparison
from agentbench_kv.results.contrast import SPEED, Contrast, Unit
from agentbench_kv.results.files import writing
from agentbench_kv.results.gate import Verdict
from agentbench_kv.results.runs import SIZES, Problem
from agentbench_kv.results.terminal import console, new_table, plain, visible

_COLUMNS = (
    "task", "model", "base", "candidate", "metric", "was", "is", "change [95% CI]", "p", "n",
    "verdict",
)  # fmt: skip
_PLAIN_MARKDOWN = frozenset(string.ascii_letters + string.digits + " .,/-:%")
# What a size or speed that fell, and one that rose, is called.
_WORDS = {**dict.fromkeys(SIZES, ("less", "more")), SPEED: ("slower", "faster")}


def targets(writes: Sequence[str]) -> list[tuple[str, Path]]:
    """Read `FORMAT=FILE` texts; a UsageError if one is not of that shape or names no format."""
    found = []
    for text in writes:
        form, separator, file = text.partition("=")
        if form not in TEXT_FORMATS or not separator or not file:
            raise UsageError(
                f"--write {text!r}: expected FORMAT=FILE with one of {', '.join(TEXT_FORMATS)}"
            )
        found.append((form, Path(file)))
    return found


def show(
    comparison: Comparison,
    form: str,
    files: Sequence[tuple[str, Path]] = (),
    problems: Sequence[Problem] = (),
) -> None:
    """Print a comparison as `terminal` or a key of `TEXT_FORMATS`, and write it to files.

    What could not be read is a line each on stderr. A PrerequisiteError if a file cannot be
    written.
    """
    tell(problems)
    for kind, path in files:
        with writing(path):
            path.write_text(TEXT_FORMATS[kind](comparison), encoding="utf-8")
    if form == "terminal":
        _print(comparison)
    else:
        sys.stdout.write(TEXT_FORMATS[form](comparison))


def tell(problems: Sequence[Problem]) -> None:
    """Say on stderr what could not be read."""
    for problem in problems:
        sys.stderr.write(visible(f"kvbench: {problem.path}: {problem.reason}") + "\n")


def _print(comparison: Comparison) -> None:
    """Print the table, then what a reader should know, the overall verdict last."""
    screen, table = console(), new_table(*_COLUMNS)
    for row in comparison.rows:
        table.add_row(*map(plain, _cells(row)))
    screen.print(table)
    margin, catch = _amounts(comparison)
    limits = f"margin {margin}, catch {catch}, exit code {comparison.exit_code}"
    lines = (*_flips(comparison), _rule(comparison), *_remarks(comparison))
    for line in (*lines, f"verdict: {comparison.verdict} ({limits})"):
        screen.print(plain(line), soft_wrap=True)


def _markdown(comparison: Comparison) -> str:
    margin, catch = _amounts(comparison)
    head = f"**kvbench compare: {comparison.verdict}** (margin {margin}, catch {catch})"
    lines = [head, "", f"| {' | '.join(_COLUMNS)} |", "|" + "---|" * len(_COLUMNS)]
    for row in comparison.rows:
        *cells, verdict = map(_markdown_escaped, _cells(row))
        lines.append(f"| {' | '.join(cells)} | **{verdict}** |")
    remarks = (_rule(comparison), *_remarks(comparison), *_flips(comparison))
    lines += ["", *(f"- {_markdown_escaped(line)}" for line in remarks)]
    return "\n".join(lines) + "\n"


def _junit(comparison: Comparison) -> str:
    """Return one test case a row: what fails the job is a failure, an allowed doubt skipped.

    What was not compared is one more.
    """
    cases = [
        (
            (", ".join(row.tasks), f"{row.metric}: {row.cand} against {row.base} with {row.model}"),
            (row.verdict, _told(row), _decides(row)),
        )
        for row in comparison.rows
    ]
    if told := comparison.lacking:
        cases.append((("kvbench", "all of BASE"), (Verdict.INCONCLUSIVE, told, None)))
    failed = [comparison.fails(verdict) for _, (verdict, *_) in cases]
    doubts = sum(verdict is not Verdict.OK for _, (verdict, *_) in cases) - sum(failed)
    suite = _suite(tests=len(failed), failures=sum(failed), errors=0, skipped=doubts)
    for (place, (verdict, told, why)), fails in zip(cases, failed, strict=True):
        named = dict(zip(("classname", "name"), map(visible, place), strict=True))
        case = ElementTree.SubElement(suite, "testcase", named)
        if verdict is not Verdict.OK:
            kind = "failure" if fails else "skipped"
            ElementTree.SubElement(case, kind, message=visible(told)).text = visible(why or told)
    output = ElementTree.SubElement(suite, "system-out")
    output.text = "\n".join(map(visible, (_rule(comparison), *_remarks(comparison))))
    return _xml(suite)


def _suite(**counts: int) -> ElementTree.Element:
    texts = {name: str(count) for name, count in counts.items()}
    return ElementTree.Element("testsuite", {"name": "kvbench compare", **texts})


def _xml(suite: ElementTree.Element) -> str:
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _github(comparison: Comparison) -> str:
    """Return workflow commands: an annotation a row, one for each remark that bears on it."""
    lines = []
    found = [
        (row.verdict, " ".join(filter(None, (_told(row), _decides(row)))))
        for row in comparison.rows
    ]
    if comparison.lacking:
        found.append((Verdict.INCONCLUSIVE, comparison.lacking))
    for verdict, told in found:
        doubt = "error" if comparison.fails(verdict) else "warning"
        severity = "notice" if verdict is Verdict.OK else doubt
        lines.append(_annotation(severity, f"kvbench {verdict}", told))
    said = {comparison.lacking, *map(_decides, comparison.rows)}
    remarks = [_rule(comparison), *(line for line in _remarks(comparison) if line not in said)]
    return "".join(lines + [_annotation("notice", "kvbench compare", line) for line in remarks])


def _annotation(severity: str, title: str, text: str) -> str:
    name, message = (
        visible(each).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        for each in (title, text)
    )
    name = name.replace(":", "%3A").replace(",", "%2C")
    return f"::{severity} title={name}::{message}\n"


# Every format but the terminal's: its name and what writes it.
TEXT_FORMATS: Mapping[str, Callable[[Comparison], str]] = {
    "markdown": _markdown,
    "junit": _junit,
    "github": _github,
    "json": lambda comparison: comparison.model_dump_json(indent=2) + "\n",
}


def write_note(files: Sequence[tuple[str, Path]], note: str, refused: bool = False) -> None:
    """Write files that say in one line why there is no comparison."""
    word = "refused" if refused else "bootstrapped"
    suite = _suite(tests=1, failures=0, errors=int(refused))
    case = ElementTree.SubElement(suite, "testcase", classname="kvbench", name="compare")
    ElementTree.SubElement(case, "error" if refused else "system-out").text = visible(note)
    texts = {
        "markdown": f"**kvbench compare: {word}**\n\n{_markdown_escaped(note)}\n",
        "junit": _xml(suite),
        "github": _annotation("error" if refused else "notice", f"kvbench {word}", note),
        "json": json.dumps({"verdict": word, "reason": note}, indent=2) + "\n",
    }
    for kind, path in files:
        with writing(path):
            path.write_text(texts[kind], encoding="utf-8")


def _cells(row: Contrast) -> tuple[str, ...]:
    groups = "" if row.clusters is None else f" in {row.clusters} groups"
    p_value = f"{row.p_adjusted:.3f}" if row.p_adjusted >= 0.0005 else "<0.001"
    return (
        *(", ".join(row.tasks), row.model, row.base, row.cand, row.metric),
        *(_level(row, row.base_level), _level(row, row.cand_level), _change(row), p_value),
        *(f"{_number(row)}{groups}", str(row.verdict)),
    )


def _level(row: Contrast, value: float) -> str:
    if "bytes" in row.metric and row.metric in SIZES:
        return f"{value / 1e6:,.3f} MB"
    if row.unit == "nats":
        return f"{value:.4f}"
    return f"{100 * value:.1f}" if row.unit == "points" else f"{value:.1f}"


def _difference(row: Contrast, value: float) -> str:
    if row.unit == "nats":
        return f"{value:+.4f}"
    return f"{100 * value:+.1f}" if row.unit == "points" else f"{100 * value:+.1f}%"


def _change(row: Contrast) -> str:
    text = _difference(row, row.point)
    if row.low is not None and row.high is not None:
        text += f" [{_difference(row, row.low)}, {_difference(row, row.high)}]"
    words = ("better", "worse") if row.mean else _WORDS.get(row.metric)
    if words and row.point:
        text += f" ({words[row.point > 0]})"
    return text


def _number(row: Contrast) -> str:
    return f"{row.n} {row.counted if row.n != 1 else row.counted.removesuffix('s')}"


def _told(row: Contrast) -> str:
    return (
        f"{row.metric} of {row.cand} against {row.base} on {', '.join(row.tasks)}: "
        f"{_level(row, row.base_level)} to {_level(row, row.cand_level)}, change {_change(row)} "
        f"over {_number(row)}: {row.verdict}"
    )


def _amounts(comparison: Comparison) -> tuple[str, str]:
    unit = comparison.rows[0].unit
    margin, catch = (_amount(unit, limit) for limit in (comparison.margin, comparison.catch))
    return margin, catch


def _amount(unit: Unit, limit: float) -> str:
    if unit == "nats":
        return f"{limit / 100:g} nats"
    return f"{limit:g}{' point' + 's' * (limit != 1) if unit == 'points' else '%'}"


def _rule(comparison: Comparison) -> str:
    """Say once what the words mean, and what several rows do to them."""
    number, (margin, catch) = len(comparison.rows), _amounts(comparison)
    sure = f"{100 * (1 - comparison.alarm):.4g}% interval"
    said = (
        f"regression: the {sure} of the change shows a loss of more than {margin}; "
        f"ok: the 95% interval rules out a loss of {catch}"
    )
    if number == 1:
        return said
    return (
        f"{said}; the {sure}s of {number} rows share the 97% of one, so that the job raises a "
        f"false alarm in at most 2 of 100, and p-values are Holm's for {number} rows"
    )


def _decides(row: Contrast) -> str | None:
    """Say what an undecided row lacks."""
    if row.verdict is not Verdict.INCONCLUSIVE:
        return None
    where = f"{row.cand} on {', '.join(row.tasks)}"
    if row.unfinished:
        return f"{where}: {row.unfinished}"
    if row.needed is None:
        return f"{where}: no number of {row.needed_of} would decide, the change lies on the limit"
    units = row.n if row.clusters is None else row.clusters
    return f"{where}: about {row.needed:,} {row.needed_of} would decide; there are {units:,}"


def _remarks(comparison: Comparison) -> list[str]:
    lines = [line for row in comparison.rows if (line := _decides(row))]
    lines += [comparison.lacking] if comparison.lacking else []
    lines += [
        f"{row.cand} on {', '.join(row.tasks)}: paired on the {row.n} samples both have; "
        f"{row.only_base} only in BASE, {row.only_cand} only in CAND"
        for row in comparison.rows
        if row.only_base or row.only_cand
    ]
    words = {"refuses": "allowed", "warns": "should not matter"}
    lines += [f"differs, {words[drift.weight]}: {drift}" for drift in comparison.drift]
    return [*lines, *comparison.notes, comparison.noise]


def _flips(comparison: Comparison) -> list[str]:
    lines = []
    for row in comparison.rows:
        if not row.flips:
            continue
        changed = row.more + row.less
        some = "" if len(row.flips) == changed else f"; the {len(row.flips)} largest changes"
        lines.append(
            f"{row.cand} against {row.base}: {changed} of {row.n} samples changed, {row.more} up "
            f"and {row.less} down{some}"
        )
        lines += [
            f"{flip.task} {flip.sample}: {flip.base:.4g} ({flip.base_status}) > {flip.cand:.4g} "
            f"({flip.cand_status}): {flip.base_transcript or 'no transcript'} | "
            f"{flip.cand_transcript or 'no transcript'}"
            for flip in row.flips
        ]
    return lines


def _markdown_escaped(text: str) -> str:
    """Write all punctuation as entities: it can then be no markup, link or mention."""
    return "".join(
        c if c in _PLAIN_MARKDOWN or ord(c) > 127 else f"&#{ord(c)};" for c in visible(text)
    )
