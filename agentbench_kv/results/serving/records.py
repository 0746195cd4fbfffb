"""What was measured, and one measurement: a repetition of one arm at one shape and load."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from agentbench_kv.results.validity import DEFAULT_INTERVAL

BASES = ("full", "full-constrained")
"""Arms that the others are compared with."""


class ServingArm(BaseModel):
    """One of the things compared.

    Attributes
    ----------
    name : str
        What rows are called; unique in a plan.
    method : str or None
        `name` or `name@preset`; None of a server whose method is not known.
    budget : int, str or None
        As the method takes it.
    settings : dict
        Every parameter of the method.
    url : str or None
        The server, where it was not started here.
    """

    model_config = ConfigDict(frozen=True)

    name: str
    method: str | None = None
    budget: int | str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)
    url: str | None = None

    @property
    def interval(self) -> int:
        """Decoded tokens between two events: what a session may hold above its budget."""
        return int(self.settings.get("interval", DEFAULT_INTERVAL))


class ServingPlan(BaseModel):
    """Everything that can change a figure, hardware and versions aside.

    Attributes
    ----------
    weights : str
        `loaded`; `dummy`, which makes every text meaningless; `unknown` of a server by URL.
    engine_args : dict
        Passed on to the engine's own command line.
    allow_untested : bool
        Whether an engine's version may be one that its adapter was not written for.
    shapes, loads : list of str
        As `loadgen.jobs` spells them: `16k/1k`, `c8`, `2/s`.
    sessions : int or None
        Of one measurement; None: twice the concurrency.
    together : bool
        Whether all engines stood at once, instead of one after the other.
    """

    model_config = ConfigDict(frozen=True)

    schema_version: Literal[1] = 1
    engine: str
    model: str
    dtype: str | None = None
    device: str | None = None
    weights: Literal["loaded", "dummy", "unknown"] = "loaded"
    engine_args: dict[str, str] = Field(default_factory=dict)
    allow_untested: bool = False
    wire: str = "gateway"
    arms: list[ServingArm]
    shapes: list[str]
    loads: list[str]
    turns: int
    tool_tokens: int
    think_time_s: float
    sessions: int | None
    warmup: int
    repeats: int
    seed: int
    together: bool = False

    @property
    def model_name(self) -> str:
        """The model without its folder."""
        return self.model.rstrip("/").rsplit("/", 1)[-1]


class Measurement(BaseModel):
    """One repetition of one arm at one shape and load.

    On disk the figures stand beside the other keys, as in the files of `vllm bench serve`.

    Attributes
    ----------
    repetition, place : int
        From 0; `place` is the arm's in the order of that repetition.
    figures : dict
        See `loadgen.metrics.figures`.
    kv : dict or None
        See `loadgen.metrics.kv_figures`.
    errors : dict
        What failed requests said, and how often.
    server : dict
        What the engine says of itself: model hash, device, dtype.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    arm: str
    shape: str
    load: str
    repetition: int
    place: int
    date: str
    backend: str
    model_id: str
    num_prompts: int
    max_concurrency: int | None
    request_rate: float | Literal["inf"]
    figures: dict[str, int | float]
    kv: dict[str, Any] | None = None
    errors: dict[str, int] = Field(default_factory=dict)
    warmup_errors: int = 0
    server: dict[str, Any] = Field(default_factory=dict)
    requests: list[dict[str, Any]] | None = None

    @property
    def key(self) -> tuple[str, str, str, int]:
        """What there is only one measurement of."""
        return (self.arm, self.shape, self.load, self.repetition)

    def document(self) -> dict[str, Any]:
        """Return the measurement as it is written."""
        plain = self.model_dump(exclude={"figures"}, exclude_none=True)
        return plain | self.figures

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Self:
        """Read what `document` returned.

        Raises
        ------
        pydantic.ValidationError
            If it is something else.
        """
        own = {name: value for name, value in document.items() if name in cls.model_fields}
        rest = {name: value for name, value in document.items() if name not in own}
        return cls.model_validate({"max_concurrency": None, **own, "figures": rest})
