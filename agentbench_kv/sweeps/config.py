"""Files that say what to run: the options of `kvbench run`, and grids of them for a sweep.

Scalars are read as the text they are, as on the command line: `no`, `010` and `1e3` mean what they
mean there, whatever YAML would make of them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    model_validator,
)

from agentbench_kv.errors import UsageError

T = TypeVar("T")
_SHOWN = 60  # characters of a wrong value
_LARGEST = 1 << 20  # bytes of a file


def _listed(value: object) -> object:
    return value if isinstance(value, list) else [value]


def _text(value: object) -> object:
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Text = Annotated[str, BeforeValidator(_text, json_schema_input_type=str | float)]


# An option: one value, or a list with an axis of them.
_LIST = Field(min_length=1)
Texts = Annotated[
    list[Text], _LIST, BeforeValidator(_listed, json_schema_input_type=Text | list[Text])
]
Whole = Annotated[
    list[int], _LIST, BeforeValidator(_listed, json_schema_input_type=int | list[int])
]
Numbers = Annotated[
    list[float], _LIST, BeforeValidator(_listed, json_schema_input_type=float | list[float])
]
Flags = Annotated[
    list[bool], _LIST, BeforeValidator(_listed, json_schema_input_type=bool | list[bool])
]
Settings = dict[str, Texts]


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class RunOptions(BaseModel, frozen=True):
    """The options of `kvbench run` by their names; a list is an axis of the grid."""

    model_config = ConfigDict(extra="forbid", alias_generator=_kebab, validate_by_name=False)

    method: Texts | None = Field(None, description="Method, or method@preset.")
    budget: Texts | None = Field(None, description="Tokens (3072, 3k), or a share (25%).")
    task: Texts | None = Field(None, description="Benchmark slice; kvbench ls tasks.")
    seed: Whole | None = None
    set: Settings | None = Field(None, description="Parameters of the method or the task.")
    engine: Texts | None = None
    model: Texts | None = Field(None, description="micro, a model's folder or a GGUF file.")
    limit: Whole | None = Field(None, description="Only the first N samples.")
    trials: Whole | None = None
    concurrency: Whole | None = Field(None, description="Sessions driven at once.")
    temperature: Numbers | None = None
    max_tokens: Whole | None = None
    timeout: Numbers | None = Field(None, description="Seconds per trial.")
    dtype: Texts | None = None
    kv_dtype: Texts | None = Field(None, description="Precision of cached rows.")
    device: Texts | None = None
    context_limit: Whole | None = None
    max_live_tokens: Whole | None = None
    engine_arg: Settings | None = Field(None, description="Options of a serving engine's own.")
    tool_syntax: Texts | None = None
    allow_untested_engine: Flags | None = None

    def given(self) -> dict[str, Any]:
        """Return what the file says: lists by the options' names, settings as dicts of lists."""
        found = self.model_dump(by_alias=True, exclude_none=True)
        return {name: found[name] for name in OPTION_NAMES if name in found}


OPTION_NAMES = tuple(_kebab(name) for name in RunOptions.model_fields)


class RunGrid(RunOptions, frozen=True):
    """Runs of a sweep: options, and what each run needs of a machine."""

    cpus: PositiveInt = Field(1, description="Cores for each run.")
    gpus: NonNegativeInt = Field(0, description="GPUs for each run.")


class SweepFile(BaseModel, frozen=True):
    """A sweep: grids of runs, without those that are excluded."""

    model_config = ConfigDict(extra="forbid", title="kvbench sweep")

    runs: list[RunGrid] = Field(min_length=1)
    exclude: list[RunOptions] = Field(
        [], description="Runs that match all options of one of these."
    )
    workers: PositiveInt | None = Field(None, description="Runs at a time.")
    retries: NonNegativeInt = Field(1, description="Further tries of a run that failed.")
    hours: PositiveFloat | None = Field(None, description="After which the sweep is interrupted.")

    @model_validator(mode="after")
    def _says_something(self) -> Self:
        if any(not each.given() for each in self.exclude):
            raise ValueError("exclude has an entry without options, which would exclude all")
        return self


def read_sweep(path: Path) -> SweepFile:
    """Read a sweep's file; whatever is wrong with it is a `UsageError` of one line."""
    return _validated(SweepFile, _load(path), path)


def read_options(path: Path) -> RunOptions:
    """Read a file of `kvbench run`'s options."""
    return _validated(RunOptions, _load(path), path)


def written(options: Mapping[str, Any]) -> str:
    """Return options, as `RunOptions.given` does, as the text of a file."""
    plain = {name: _single(value) for name, value in options.items()}
    text: str = yaml.safe_dump(plain, sort_keys=False, allow_unicode=True)
    return text


def _single(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _single(each) for key, each in value.items()}
    return value[0] if len(value) == 1 else list(value)


def schema() -> dict[str, Any]:
    """Return the JSON schema of a sweep's file."""
    described = SweepFile.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **described}


class _Loader(yaml.BaseLoader):  # type: ignore[misc]  # it has no types
    """Reads every scalar as text, and no key twice."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for name, value in node.value:
            key = self.construct_object(name, deep=True)
            if not isinstance(key, str) or key in found:
                what = f"{key!r} is given twice" if isinstance(key, str) else "a key is no text"
                raise yaml.constructor.ConstructorError(None, None, what, name.start_mark)
            found[key] = self.construct_object(value, deep=deep)
        return found


def _load(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            raw = file.read(_LARGEST + 1)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from error
    if len(raw) > _LARGEST:
        raise UsageError(f"{path} is larger than {_LARGEST:,} bytes; expected a sweep's YAML file")
    try:
        found = yaml.load(raw, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f" line {mark.line + 1}" if mark else ""
        raise UsageError(f"{path}{where}: {error.problem or 'no YAML'}") from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"{path} is no YAML: {str(error).splitlines()[0][:200]}") from None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: expected keys with values, such as `task: micro/recall-1k`")
    return found


M = TypeVar("M", bound=BaseModel)


def _validated(kind: type[M], found: dict[str, Any], path: Path) -> M:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        # A key that is misspelled is also one that is missing.
        found_wrong = sorted(
            error.errors(include_url=False), key=lambda each: each["type"] != "extra_forbidden"
        )
    except RecursionError:
        raise UsageError(f"{path}: a list or mapping holds itself") from None
    raise UsageError(f"{path}: {_explained(kind, found_wrong[0])}")


def _explained(kind: type[BaseModel], error: Mapping[str, Any]) -> str:
    """Say in one line where a file is wrong and what was expected there."""
    *inside, last = error["loc"] or ("",)
    where = _place(inside)
    if error["type"] == "extra_forbidden":
        known = _keys(kind, inside)
        close = difflib.get_close_matches(str(last), known, n=1, cutoff=0.5)
        hint = f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}"
        return f"unknown key {str(last)[:_SHOWN]!r}{where and ' in ' + where}; {hint}"
    place = _place(error["loc"])
    given = f": {str(error['input'])[:_SHOWN]!r}" if isinstance(error["input"], str) else ""
    return f"{place}{given}: {error['msg'].removeprefix('Value error, ')}".lstrip(": ")


def _place(path: Iterable[str | int]) -> str:
    words = [f"[{part}]" if isinstance(part, int) else f".{part}" for part in path]
    return "".join(words).lstrip(".")


def _keys(kind: type[BaseModel], inside: Iterable[str | int]) -> list[str]:
    """Return the keys that the mapping at a place of the file may have."""
    first = next(iter(inside), None)
    if kind is SweepFile and first is not None:
        kind = RunGrid if first == "runs" else RunOptions
    return [field.alias or name for name, field in kind.model_fields.items()]
