"""What was measured, and one measurement: a repetition of one arm at one shape and load."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from agentbench_kv.results.validity import DEFAULT_INTERVAL

BASES = ("full", "full-constrained")
"""Arms that the others are compared with."""


class ServingArm(BaseModel):
    """One of the things compared."""

    model_config = ConfigDict(frozen=True)

    name: str  # unique in a plan
    method: str | None = None  # `name` or `name@preset`; None of a server whose method is unknown
    budget: int | str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)  # every parameter of the method
    url: str | None = None  # of a server that was not started here

    @property
    def interval(self) -> int:
        """Decoded tokens between two events: what a session may hold above its budget."""
        return int(self.settings.get("interval", DEFAULT_INTERVAL))


class ServingPlan(BaseModel):
    """Everything that can change a figure, hardware and versions aside."""

    model_config = ConfigDict(frozen=True)

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
    shapes: list[str]  # as `loadgen.jobs` spells them: `16k/1k`
    loads: list[str]  # `c8`, `2/s`
    turns: int
    tool_tokens: int
    think_time_s: float
    sessions: int | None  # of one measurement; None: twice the concurrency
    warmup: int
    repeats: int
    seed: int
    together: bool = False  # whether all engines stood at once

    @property
    def model_name(self) -> str:
        """The model without its folder."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]


class Measurement(BaseModel):
    """One repetition of one arm at one shape and load.

    On disk the figures stand beside the other keys, as in the files of `vllm bench serve`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

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
    figures: dict[str, int | float]  # of `loadgen.metrics.figures`
    kv: dict[str, Any] | None = None  # of `loadgen.metrics.kv_figures`
    errors: dict[str, int] = Field(default_factory=dict)  # what failed requests said, how often
    warmup_errors: int = 0
    server: dict[str, Any] = Field(default_factory=dict)  # what the engine says of itself
    requests: list[dict[str, Any]] | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is only one measurement of."""
        return (self.arm, self.shape, self.load, self.repetition)

    def document(self) -> dict[str, Any]:
        """Return the measurement as it is written."""
        return self.model_dump(exclude={"figures"}, exclude_none=True) | self.figures

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Read what `document` returned; a pydantic.ValidationError if it is something else."""
        own = {name: value for name, value in document.items() if name in cls.model_fields}
        rest = {name: value for name, value in document.items() if name not in own}
        return cls.model_validate({"max_concurrency": None, **own, "figures": rest})
