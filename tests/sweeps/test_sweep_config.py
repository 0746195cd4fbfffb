"""Files of sweeps and of runs: what they say, what is refused, what they expand to."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from agentbench_kv.cli.options import GRID_OPTIONS, SPEC_OPTIONS
from agentbench_kv.errors import UsageError
from agentbench_kv.run.spec import RunSpec, grid
from agentbench_kv.sweeps.config import OPTION_NAMES, SweepFile, read_options, read_sweep, schema
from agentbench_kv.sweeps.grid import MOST_RUNS, jobs_of

WHOLE = """
runs:
  - task: micro/recall-1k
    method: [full, snapkv]
    budget: [64, 3k, 25%]
    seed: [0, 1]
    limit: 2
    set: {window: [8, 16]}
exclude:
  - {method: snapkv, budget: 3000, seed: 1}
retries: 2
hours: 0.5
"""


@pytest.fixture
def file(tmp_path: Path):
    def write(text: str | bytes) -> Path:
        path = tmp_path / "sweep.yaml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def test_a_grid_is_every_combination_without_what_is_excluded(file):
    text = WHOLE.replace("    set: {window: [8, 16]}\n", "")
    found = jobs_of(read_sweep(file(text)), {})
    specs = {(j.spec.method, str(j.spec.budget), j.spec.seed) for j in found}
    budgets, seeds = ("64", "3000", "25%"), (0, 1)
    snapkv = set(itertools.product(["snapkv"], budgets, seeds)) - {("snapkv", "3000", 1)}
    # Without a budget of its own, `full` is one run a seed.
    assert {(m.partition("@")[0], b, s) for m, b, s in specs} == snapkv | {
        ("full", "None", 0),
        ("full", "None", 1),
    }
    assert len(found) == len(specs)
    assert {j.spec.limit for j in found} == {2}


def test_what_is_left_to_be_chosen_can_be_excluded(file):
    text = "runs: [{budget: 64, kv-dtype: [auto, int8]}]\nexclude: [{kv-dtype: auto}]"
    assert [j.spec.kv_dtype for j in jobs_of(read_sweep(file(text)), {})] == ["int8"]


def test_settings_are_axes_too(file):
    text = "runs: [{method: snapkv, budget: 64, limit: 1, set: {window: [8, 16], kernel: 3}}]"
    found = jobs_of(read_sweep(file(text)), {})
    assert [(j.spec.params["window"], j.spec.params["kernel"]) for j in found] == [(8, 3), (16, 3)]


def test_a_sweep_runs_what_kvbench_run_does(file):
    """The same names and defaults: a run of the one is found again by the other."""
    base = RunSpec("embedded", "micro", "", None, "")
    run = grid(base, ["agentkv"], [64], ["micro/recall-5k"], [3], {"interval": "16"})
    text = "runs: [{budget: 64, seed: 3, set: {interval: 16}}]"
    assert [j.name for j in jobs_of(read_sweep(file(text)), {})] == [each.id for each in run]


def test_names_are_those_of_the_command_line():
    import click

    @click.command()
    def command() -> None: ...

    for declare in (*GRID_OPTIONS, *SPEC_OPTIONS.values()):
        command = declare(command)
    names = {opt.opts[0].removeprefix("--") for opt in command.params}
    assert names == set(OPTION_NAMES)


def test_what_is_given_on_the_command_line_replaces_the_file(file):
    found = jobs_of(read_sweep(file("runs: [{method: full, seed: [1, 2]}]")), {"seed": [9]})
    assert [j.spec.seed for j in found] == [9]


def test_runs_that_load_the_same_follow_each_other(file):
    text = """
runs:
  - {engine: scripted, model: [gold, "null"], seed: [0, 1], method: full}
  - {engine: scripted, model: gold, seed: 2, method: full}
"""
    found = jobs_of(read_sweep(file(text)), {})
    assert [(j.spec.model, j.spec.seed) for j in found] == [
        *(("gold", 0), ("gold", 1), ("gold", 2), ("null", 0), ("null", 1)),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs: [{bugdet: 3}]", "unknown key 'bugdet' in runs[0]; did you mean 'budget'?"),
        ("run: [{budget: 3}]", "unknown key 'run'; did you mean 'runs'?"),
        ("runs: [{max_tokens: 3}]", "did you mean 'max-tokens'?"),
        ("runs: [{}]\nexclude: [{sede: 1}]", "unknown key 'sede' in exclude[0]; did you mean 'se"),
        ("runs: [{seed: x}]", "runs[0].seed[0]: 'x': Input should be a valid integer"),
        ("runs: [{seed: []}]", "at least 1 item"),
        ("runs: []", "at least 1 item"),
        ("runs: [{seed: 1, seed: 2}]", "line 1: 'seed' is given twice"),
        ("runs: [{}]\nexclude: [{}]", "exclude has an entry without options"),
        ("runs: [{set: {a: {b: 1}}}]", "valid string"),
        ("runs: [{gpus: -1}]", "greater than or equal to 0"),
        ("runs: [{}]\nhours: 0", "greater than 0"),
        ("runs: &a [*a]", "recursive"),
        ("? [a]\n: b", "a key is no text"),
        ("a: [1", "line 1"),
        ("- a", "expected keys with values"),
        ("", "expected keys with values"),
        (b"runs: \xff\xff", "no YAML"),
        ("runs: [{limit: null}]", "'null': Input should be a valid integer"),
        ("a: &a [x]\nb: &b [*a,*a]\nruns: [{seed: *b}]", "unknown key 'a'"),
    ],
)
def test_what_is_wrong_is_one_line(file, text, said):
    with pytest.raises(UsageError) as caught:
        read_sweep(file(text))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_text_means_what_it_means_on_the_command_line(file):
    """YAML would make False of `no`, 8 of `010` and a date of the third."""
    text = 'task: x\nset: {a: no, b: 010, c: 2024-01-02, d: 1e3, e: "5"}\nlimit: 010\n'
    given_there = read_options(file(text)).given()
    assert given_there["set"] == {
        "a": ["no"], "b": ["010"], "c": ["2024-01-02"], "d": ["1e3"], "e": ["5"],
    }  # fmt: skip
    assert given_there["limit"] == [10]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("runs: [{method: full}]\nexclude: [{seed: 7}]", "exclude[0] matches no run"),
        ("runs: [{method: full, seed: 7}]\nexclude: [{seed: 7}]", "every run is excluded"),
        ("runs: [{method: fulll}]", "did you mean 'full'"),
        ("runs: [{method: full, set: {x: 1}}]", "x"),
        ("runs: [{method: full, trials: 0}]", "trials 0"),
    ],
)
def test_what_no_run_can_be_is_refused(file, text, said):
    with pytest.raises(UsageError, match=said.replace("[", r"\[").replace("]", r"\]")):
        jobs_of(read_sweep(file(text)), {})


def test_a_grid_without_bounds_is_refused_before_it_is_expanded(file):
    axis = list(range(200))
    text = json.dumps({"runs": [{"seed": axis, "limit": axis, "trials": axis, "max-tokens": axis}]})
    with pytest.raises(UsageError, match=f"at most {MOST_RUNS:,}"):
        jobs_of(read_sweep(file(text)), {})


scalars = st.text(max_size=5) | st.integers(-3, 3) | st.booleans() | st.none() | st.floats()
documents = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["runs", "exclude", "seed", "set", "x", ""]), inner),
    max_leaves=12,
)  # fmt: skip


@given(documents)
def test_any_document_is_a_sweep_or_one_line(tmp_path_factory, document):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(document))
    try:
        read_sweep(path)
    except UsageError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_the_schema_says_what_the_model_takes():
    described = schema()
    runs = described["$defs"]["RunGrid"]
    assert set(runs["properties"]) == {*OPTION_NAMES, "cpus", "gpus"}
    assert runs["additionalProperties"] is False
    assert described["required"] == ["runs"]
    # One value and a list of them are both shown to an editor as right.
    kinds = json.dumps(runs["properties"]["seed"])
    assert '{"type": "integer"}' in kinds
    assert '"type": "array"' in kinds
    with pytest.raises(ValidationError):
        SweepFile.model_validate({"runs": [{"seed": "x"}]})
