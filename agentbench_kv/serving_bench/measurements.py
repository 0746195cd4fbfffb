"""A folder of measurements: the plan of what is compared, a file for each one, a summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic, writing
from agentbench_kv.results.summary import DEFAULT_INTERVAL
from agentbench_kv.results.tables.model import slug

PLAN = "serving.json"
SUMMARY = "summary.json"

_RARE = (
    "trace",
    "time_scale",
    "goodput",
    "pool_mb",
)  # later than the first plans, whose folders keep names
Parsed = TypeVar("Parsed")


class ServingArm(BaseModel, frozen=True):
    """One of the things compared."""

    name: str  # unique in a plan
    method: str | None = None  # `name` or `name@preset`; None of a server whose method is unknown
    budget: int | str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # every parameter of the method
    kv_dtype: str = ""  # precision of cached rows, where it is not the dtype
    url: str | None = None  # of a server that was not started here

    @property
    def drops(self) -> bool:
        """Whether its method drops messages: only those have an execution."""
        return "exec" in self.settings

    @property
    def interval(self) -> int:
        """Decoded tokens between two events: what a session may hold above its budget."""
        return int(self.settings.get("interval", DEFAULT_INTERVAL))


class TraceFigures(BaseModel, frozen=True):
    """What is known of a trace before it is played; of the sessions that are played."""

    form: str
    sha256: str
    sessions: int
    calls: int
    prompt_tokens: int  # as an API would bill
    output_tokens: int
    prefix_hits: float  # share of the prompt tokens, of an endless cache
    notes: list[str] = Field(default_factory=list)

    @property
    def sentence(self) -> str:
        ratio = self.prompt_tokens / self.output_tokens
        return (
            f"trace ({self.form}): {self.sessions:,} sessions, {self.calls:,} calls, "
            f"{self.prompt_tokens:,} prompt tokens, {ratio:,.1f} for each generated; an endless "
            f"prefix cache would hold {self.prefix_hits:.1%}"
        )


class ServingPlan(BaseModel, frozen=True):
    """Everything that can change a figure, hardware and versions aside."""

    schema_version: Literal[1] = 1
    engine: str
    model: str
    dtype: str | None = None
    device: str | None = None
    weights: Literal["loaded", "dummy", "unknown"] = "loaded"  # unknown of a server by URL
    engine_args: dict[str, str] = Field(default_factory=dict)  # for the engine's command line
    allow_untested: bool = False  # engine versions that the adapter was not written for
    wire: str = "gateway"
    arms: list[ServingArm]
    shapes: list[str]  # as `SessionShape` spells them: `16k/1k`
    loads: list[str]  # `c8`, `2/s`
    turns: int
    tool_tokens: int
    think_time_s: float
    sessions: int | None  # of one measurement; None: twice the concurrency
    warmup: int
    repeats: int
    seed: int
    together: bool = False  # whether all engines ran at once
    trace: TraceFigures | None = None  # what is played instead of shapes; `shapes` has its name
    time_scale: float = 1.0  # of the trace's gaps and clock
    pool_mb: float | None = (
        None  # of cached rows, the same for every arm; None: the engine's choice
    )
    goodput: dict[str, float] = Field(default_factory=dict)  # ms that a good request keeps to

    def document(self) -> dict[str, Any]:
        """Return the plan as a folder records it; what few plans have, only of those."""
        plain = self.model_dump()
        for name in _RARE:
            if plain[name] == type(self).model_fields[name].get_default(call_default_factory=True):
                del plain[name]
        for arm in plain["arms"]:
            if not arm["kv_dtype"]:
                del arm["kv_dtype"]
        return plain

    @property
    def model_name(self) -> str:
        return self.model.rstrip("/").rsplit("/", 1)[-1]


class Quality(BaseModel, frozen=True, extra="forbid"):
    """What an arm makes of a trace's recorded answers, played once more after a measurement."""

    calls_right: int = 0  # recorded calls whose every token is the arm's own best
    calls: int = 0
    events: int = 0  # evictions in those sessions
    seconds: float = 0.0  # that it took, beside the measured time
    reason: str = ""  # why it was not measured

    @property
    def exact(self) -> float | None:
        return self.calls_right / self.calls if self.calls and not self.reason else None


class LoadMeasurement(BaseModel, frozen=True, extra="forbid"):
    """One repetition of an arm at a shape and load; files are like those of `vllm bench serve`."""

    arm: str
    shape: str
    load: str
    repetition: int  # from 0
    place: int  # the arm's in the order of that repetition
    date: str
    backend: str
    model_id: str
    num_prompts: int
    max_concurrency: int | None
    request_rate: float | Literal["inf"]
    figures: dict[str, int | float]  # see `loadgen.figures`
    kv: dict[str, Any] | None = None  # see `loadgen.kv_figures`
    errors: dict[str, int] = Field(default_factory=dict)  # what failed requests said, how often
    warmup_errors: int = 0
    server: dict[str, Any] = Field(default_factory=dict)  # what the engine says of itself
    pool_bytes: int | None = None  # most of the KV memory that all sessions took up at once
    quality: Quality | None = None  # of the arm, in one of its measurements
    requests: list[dict[str, Any]] | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is only one measurement of."""
        return (self.arm, self.shape, self.load, self.repetition)

    @property
    def failed(self) -> int:
        return int(self.figures.get("failed", 0))

    def document(self) -> dict[str, Any]:
        return self.model_dump(exclude={"figures"}, exclude_none=True) | self.figures

    @classmethod
    def from_document(cls, document: Mapping[str, Any]) -> Self:
        """Read what `document` returned; a pydantic.ValidationError if it is something else."""
        own = {name: value for name, value in document.items() if name in cls.model_fields}
        rest = {name: value for name, value in document.items() if name not in own}
        return cls.model_validate({"max_concurrency": None, **own, "figures": rest})


def read_per_token(measured: LoadMeasurement) -> float | None:
    """Return bytes of keys and values that a decoded token's attention read; None if not known."""
    account = measured.kv or {}
    read, tokens = account.get("bytes_read"), account.get("decode_tokens")
    return read / tokens if read and tokens else None


class ServingFolder:
    """Measurements of one plan; `provenance` is versions and hardware."""

    def __init__(self, path: Path, plan: ServingPlan, provenance: Mapping[str, Any]) -> None:
        self.path = path
        self.plan = plan
        self.provenance = dict(provenance)

    @classmethod
    def create(cls, path: Path, plan: ServingPlan, provenance: Mapping[str, Any]) -> Self:
        """Begin a folder, or go on with one of the same plan; a UsageError if it has another."""
        if (path / PLAN).exists():
            known = cls.read(path)
            if known.plan != plan:
                raise UsageError(
                    f"{path} holds measurements with other settings; choose another --out"
                )
            return known
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        document = {**plan.document(), "provenance": dict(provenance)}
        write_atomic(path / PLAN, json_bytes(document, indent=2))
        return cls(path, plan, provenance)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open a folder; a UsageError if it holds no plan that can be read."""
        return _read(
            path / PLAN,
            lambda said: cls(path, ServingPlan.model_validate(said), said.get("provenance", {})),
        )

    def add(self, measurement: LoadMeasurement) -> Path:
        name = slug(measurement.arm, measurement.shape, measurement.load)
        path = self.path / f"rep{measurement.repetition + 1:02d}-{name}.json"
        write_atomic(path, json_bytes(measurement.document(), indent=2))
        return path

    def measurements(self) -> list[LoadMeasurement]:
        """Return all measurements, by file name; a UsageError if a file is not one."""
        paths = sorted(self.path.glob("rep*.json"))
        return [_read(path, LoadMeasurement.from_document) for path in paths]

    def write_summary(self, document: Mapping[str, Any]) -> None:
        write_atomic(self.path / SUMMARY, json_bytes(document, indent=2))


def serving_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of measurements at or directly below some paths, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        own = [path] if (path / PLAN).is_file() else []
        below = sorted(each.parent for each in path.glob(f"*/{PLAN}")) if path.is_dir() else []
        found |= dict.fromkeys([*own, *below])
    return list(found)


def _read(path: Path, parse: Callable[[dict[str, Any]], Parsed]) -> Parsed:
    try:
        document = json.loads(path.read_bytes())
        if isinstance(document, dict):
            return parse(document)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise UsageError(f"{path}: {place}: {problem['msg']}") from error
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    raise UsageError(f"{path} holds no JSON object")
