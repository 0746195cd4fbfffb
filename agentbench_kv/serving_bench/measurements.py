"""A folder of measurements: the plan of what is compared, a file for each one, a summary."""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Callable, Iterable, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic, writing
from agentbench_kv.results.store import METHOD_CODE
from agentbench_kv.results.tables.model import slug
from agentbench_kv.results.validity import DEFAULT_INTERVAL

PLAN = "serving.json"
SUMMARY = "summary.json"
_ATTEMPTS = "attempts.json"
SPEED = "output_throughput"
GOODPUT = "request_goodput"

_RARE = (
    "trace",
    "time_scale",
    "goodput",
    "pool_mb",
    "tool_syntax",
    "tokenizer",
    "vocab",
)  # later than the first plans, whose folders keep names
_RATES = {
    "request_throughput": ("completed",),
    SPEED: ("total_output_tokens",),
    "total_token_throughput": ("total_input_tokens", "total_output_tokens"),
}
_ROUNDING = 1e-6
_SESSION_GOODPUT = "session_goodput"
_NEEDED = ("duration", "completed", "failed", "total_output_tokens", SPEED)
_OF_SERVER = ("environment", "threads", "model_sha", "device")  # the same for all arms
_OF_ARMS = ("as shipped", "plug-in")  # set-ups, in which others name an engine's version
_COUNTS = TypeAdapter(dict[str, int])
Parsed = TypeVar("Parsed")
Key = tuple[str, str, str, int]  # a measurement's arm, shape, load and repetition


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
            f"trace ({self.form}): {self.sessions:,} sessions, {self.calls:,} requests, "
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
    tool_syntax: str = "auto"  # how the trace's calls are written
    tokenizer: str | None = None  # folder whose ids are sent to servers by URL
    vocab: int | None = None  # or the number that they are below

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

    @property
    def open_at_most(self) -> int | None:
        """Sessions that a load can have open; None: as many as it asks for."""
        known = [self.sessions, self.trace.sessions if self.trace else None]
        return min((each for each in known if each is not None), default=None)


class Quality(BaseModel, frozen=True, extra="forbid"):
    """What an arm makes of a trace's recorded answers, played once more after a measurement."""

    calls_right: int = 0  # recorded calls whose every token is the arm's own best
    calls: int = 0
    # Right and asked of each session with calls; older files have none.
    parts: dict[str, tuple[int, int]] = Field(default_factory=dict)
    behind: dict[str, tuple[int, int]] | None = None  # of these, in answers behind an event
    events: int = 0  # evictions in those sessions
    seconds: float = 0.0  # that it took, beside the measured time
    reason: str = ""  # why it was not measured
    failed: bool = False  # for a reason that may pass: it is tried again
    origin: str = ""  # as a measurement's; it may be counted later than that

    @model_validator(mode="after")
    def _adds_up(self) -> Self:
        pairs = [(self.calls_right, self.calls), *self.parts.values()]
        sums = tuple(sum(column) for column in zip(*self.parts.values(), strict=True))
        behind = self.behind or {}
        # A session's calls in front of its first event are calls, too.
        before = [
            tuple(own - late for own, late in zip(self.parts.get(name, (0, 0)), pair, strict=True))
            for name, pair in behind.items()
        ]
        parts = [*pairs, *behind.values(), *before]
        if not all(0 <= right <= asked for right, asked in parts) or sums not in ((), pairs[0]):
            raise ValueError(f"{self.calls_right} right calls of {self.calls} do not add up")
        return self

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
    begun: int = 1  # how often it was: earlier ones failed, or were interrupted or removed
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
    random_prompts: bool | None = None  # drawn anew, so that no cache can know them
    prefixes_kept: str = ""  # why the server's prefix cache was not emptied before
    restarts: int = 0  # how often the backend died meanwhile and was started again
    timeout_s: float | None = None  # after which a request has failed
    provenance: dict[str, Any] = Field(default_factory=dict)  # versions and hardware

    @property
    def origin(self) -> str:
        """Where it was measured, in words and a digest: the machine, versions, code, weights."""
        setup = self.server.get("setup")
        engine = self.server.get("version") or (None if setup in _OF_ARMS else setup)
        own = {name: self.server.get(name) for name in _OF_SERVER} | {"engine": engine}
        known = {**self.provenance, **{name: value for name, value in own.items() if value}}
        machine = known.get("hardware") or {}
        commit = known.get("git_commit")
        if code := known.get("code_sha"):
            known.pop("git_commit", None)  # commits of the same code are no two places
        state = f", code {code[:8]}" if code else f" at {commit[:8]}" if commit else ""
        words = (
            machine.get("gpu") or machine.get("cpu") or "a machine unknown",
            f"kvbench {known.get('kvbench') or 'unknown'}{state}",
            *(str(own[name]) for name in ("engine", "environment") if own[name]),
            *(f"{own[name]} threads" for name in ("threads",) if own[name]),
        )
        digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()
        return f"{', '.join(words)} ({digest[:6]})"

    @property
    def file_name(self) -> str:
        return _file_of(self.key)

    @property
    def key(self) -> Key:
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
        found = cls.model_validate({"max_concurrency": None, **own, "figures": rest})
        return found.model_copy(update={"figures": found.figures | _rates(found.figures)})


def _rates(figures: Mapping[str, float]) -> dict[str, float]:
    """Return what totals and duration say of a file's rates, whatever stands there."""
    seconds = figures.get("duration") or 0.0
    if seconds <= 0:
        return {}
    return {
        rate: sum(figures[total] for total in totals) / seconds
        for rate, totals in _RATES.items()
        if all(total in figures for total in totals)
    }


def _contradiction(measured: LoadMeasurement) -> str:
    """Say which figures of a measurement cannot go together; "" if they can."""
    figures = measured.figures
    seconds, completed = figures["duration"], figures["completed"]
    if reason := _miscounted(measured):
        return reason
    busy = figures.get("mean_e2el_ms", 0.0) / 1e3 * completed  # seconds, of all requests
    told = figures.get("concurrency", busy / seconds if seconds > 0 else 0.0) * seconds
    if abs(told - busy) > _ROUNDING * busy:
        return "completed, mean_e2el_ms, concurrency and duration do not go together"
    if busy > (measured.max_concurrency or math.inf) * seconds * (1 + _ROUNDING):
        return f"duration is too short for {completed:,} requests of that mean_e2el_ms"
    mean = figures.get("mean_e2el_ms", 0.0)
    middle, spread = figures.get("median_e2el_ms", mean), figures.get("std_e2el_ms", math.inf)
    # Of no numbers is the median further from the mean than their standard deviation.
    if abs(mean - middle) > spread + _ROUNDING * max(1.0, mean):
        return "mean_e2el_ms, median_e2el_ms and std_e2el_ms do not go together"
    told, counted = figures.get("total_output_tokens", 0), (measured.kv or {}).get("decode_tokens")
    if counted and not measured.failed and told > counted:
        return f"total_output_tokens are more than the {counted:,} that the engine decoded"
    return ""


def _miscounted(measured: LoadMeasurement) -> str:
    """Say which counts of requests cannot go together; "" if they can."""
    figures, sent = measured.figures, measured.num_prompts
    completed, seconds = int(figures["completed"]), figures["duration"]
    if completed + measured.failed > sent or (not measured.failed and completed < sent):
        return f"completed and failed do not go together with num_prompts ({sent:,})"
    if sum(measured.errors.values()) > measured.failed:
        return "errors are of more requests than failed"
    for name, most in ((GOODPUT, completed), (_SESSION_GOODPUT, figures.get("sessions", sent))):
        good = figures.get(name, 0.0) * seconds
        if abs(good - round(good)) > _ROUNDING * max(1.0, good):
            return f"{name} and duration make no whole number"
        if round(good) > most:
            return f"{name} and duration make {round(good):,}, and there were {most:,}"
    return ""


def of_method(server: Mapping[str, Any]) -> dict[str, str]:
    """Return what an engine said of its method's code and calibration, by what they are called."""
    calibration = (server.get("calibration") or {}).get("sha256")
    known = {"code": server.get(METHOD_CODE), "calibration": calibration}
    return {name: str(value) for name, value in known.items() if value}


def read_per_token(measured: LoadMeasurement) -> float | None:
    """Return bytes of keys and values that a decode step read for a session; None if not known.

    The first token of every answer comes from its prefill.
    """
    account = measured.kv or {}
    read = account.get("bytes_read")
    steps = account.get("decode_tokens", 0) - measured.figures.get("completed", 0)
    return read / steps if read and steps > 0 else None


class ServingFolder:
    """Measurements of one plan; `provenance` is versions and hardware."""

    def __init__(
        self, path: Path, plan: ServingPlan, provenance: Mapping[str, Any], salt: str = ""
    ) -> None:
        self.path = path
        self.plan = plan
        self.provenance = dict(provenance)  # of whoever began it
        self.salt = salt  # of prompts for servers by URL, which may know those of other folders

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
        _refuse_alike(plan)
        with writing(path):
            path.mkdir(parents=True, exist_ok=True)
        salt = secrets.token_hex(8) if any(arm.url for arm in plan.arms) else ""
        document = {**plan.document(), "provenance": dict(provenance)}
        document |= {"salt": salt} if salt else {}
        write_atomic(path / PLAN, json_bytes(document, indent=2))
        return cls(path, plan, provenance, salt)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open a folder; a UsageError if it holds no plan that can be read."""

        def parse(said: dict[str, Any]) -> tuple[ServingPlan, Mapping[str, Any], str]:
            about = said.get("provenance", {}), str(said.get("salt", ""))
            return ServingPlan.model_validate(said), *about

        return cls(path, *_read(path / PLAN, parse))

    def begin(self, key: Key) -> int:
        """Note that a measurement is begun; return how often it was, with this time."""
        name = _file_of(key)
        before = int((self.path / name).is_file())  # by a version that did not count
        counts = self._attempts()
        counts[name] = counts.get(name, before) + 1
        write_atomic(self.path / _ATTEMPTS, json_bytes(counts, indent=2))
        return counts[name]

    def begun(self, repetition: int) -> int:
        """Count how often measurements of a repetition were begun."""
        counts, prefix = self._attempts(), _prefix(repetition)
        own = [count for name, count in counts.items() if name.startswith(prefix)]
        return sum(own, counts.get(str(repetition), 0))  # that, of a version that counted these

    def missing(self) -> list[str]:
        """Name the files of measurements that were begun and are not there."""
        names = (name for name in self._attempts() if name.startswith("rep"))
        return sorted(name for name in names if not (self.path / name).is_file())

    def _attempts(self) -> dict[str, int]:
        """Return how often each measurement was begun, by its file's name."""
        path = self.path / _ATTEMPTS
        return _read(path, _COUNTS.validate_python) if path.is_file() else {}

    def add(self, measurement: LoadMeasurement) -> Path:
        path = self.path / measurement.file_name
        write_atomic(path, json_bytes(measurement.document(), indent=2))
        return path

    def measurements(self) -> list[LoadMeasurement]:
        """Return all measurements, by file name, each with its provenance.

        A UsageError if a file is not one, or not of this plan.
        """
        return [self._measurement(path) for path in sorted(self.path.glob("rep*.json"))]

    def _measurement(self, path: Path) -> LoadMeasurement:
        found = _read(path, LoadMeasurement.from_document)
        if path.name != found.file_name:  # so that there is one of a key
            raise UsageError(
                f"{path} is {found.file_name} by what it holds; remove it, a copied file is no "
                "other repetition"
            )
        if not 0 <= found.repetition < self.plan.repeats:
            raise UsageError(
                f"{path}: repetition {found.repetition + 1} of {self.plan.repeats}; remove it"
            )
        needed = [*_NEEDED, *[GOODPUT, _SESSION_GOODPUT] * bool(self.plan.goodput)]
        needed += ["mean_e2el_ms"] * bool(found.figures.get("completed"))
        if lacking := [name for name in needed if name not in found.figures]:
            raise UsageError(f"{path} has no {', '.join(lacking)}; remove it and measure it again")
        begun = self._attempts().get(path.name, found.begun)
        reason = _contradiction(found)
        if begun != found.begun and not found.failed:  # what has failed may be under way again
            reason = f"begun {found.begun} times by this file and {begun} times by {_ATTEMPTS}"
        if reason:
            raise UsageError(
                f"{path}: {reason}, so one of them was changed; remove it and measure it again"
            )
        if found.provenance:
            return found
        return found.model_copy(update={"provenance": self.provenance})

    def write_summary(self, document: Mapping[str, Any]) -> None:
        write_atomic(self.path / SUMMARY, json_bytes(document, indent=2))


def _file_of(key: Key) -> str:
    *names, repetition = key
    return f"{_prefix(repetition)}{slug(*names)}.json"


def _prefix(repetition: int) -> str:
    return f"rep{repetition + 1:02d}-"


def served_model(plan: ServingPlan, measured: Iterable[LoadMeasurement]) -> str:
    """Return the plan's model; of servers by URL, what they called theirs."""
    if plan.engine != "url":
        return plan.model
    said = dict.fromkeys(each.model_id.rstrip("/") for each in measured)
    return " + ".join(said) or plan.model


def _refuse_alike(plan: ServingPlan) -> None:
    """Refuse a plan two of whose measurements would have one label or file."""
    seen: dict[str, str] = {}
    for arm, shape, load in product([arm.name for arm in plan.arms], plan.shapes, plan.loads):
        name, label = slug(arm, shape, load), f"{arm}, {shape}, {load}"
        if name in seen:
            raise UsageError(
                f"{seen[name]!r} and {label!r} would share a file, rep01-{name}.json; give arms "
                "and loads names that differ in letters or digits"
            )
        seen[name] = label


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
