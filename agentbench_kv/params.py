"""Parameters of methods and tasks: declared once as fields, parsed from `--set key=value`.

Parameters of methods: see `agentbench_kv.params`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass, replace
from typing import Any

from agentbench_kv.errors import UsageError, unknown_name

_LARGEST = 2**63 - 1  # of a number
_SHOWN = 200  # characters of a wrong value


@dataclass(frozen=True)
class ParamSpec:
    """What a parameter is and which values it takes."""

    name: str
    type: type
    default: Any
    doc: str
    choices: tuple[Any, ...] | None = None
    low: float | None = None
    high: float | None = None
    rare: bool = False  # recorded only where it is set, so that older runs keep their ids
    counts: bool = False  # besides the choices, a number of tokens from 1 on, as text

    def allowed(self) -> str:
        """Say in words which values are valid."""
        if self.choices is not None:
            more = ", or a number of tokens >= 1" if self.counts else ""
            return "one of " + ", ".join(str(choice) for choice in self.choices) + more
        if self.type is str:
            return "a text"
        kind = "an integer" if self.type is int else "a number"
        low = "" if self.low is None else f" >= {self.low:g}"
        high = "" if self.high is None else f" <= {self.high:g}"
        return f"{kind}{low}{' and' if low and high else ''}{high}"

    def parse(self, value: Any) -> Any:
        """Turn `value` (text or already typed) into a valid value.

        Raises
        ------
        UsageError
            If it is not one; the message names the allowed values.
        """
        if self.counts and value not in (self.choices or ()):
            count = replace(self, type=int, choices=None, low=1, counts=False)
            try:
                return str(count.parse(value))
            except UsageError:
                raise self._wrong(value) from None
        try:
            parsed = self.type(value)
        except (TypeError, ValueError, OverflowError):
            raise self._wrong(value) from None
        if isinstance(value, bool) or (isinstance(value, float) and parsed != value):
            raise self._wrong(value)
        if isinstance(parsed, int | float) and not abs(parsed) <= _LARGEST:
            raise replace(self, high=_LARGEST if self.high is None else self.high)._wrong(value)
        outside = (self.low is not None and parsed < self.low) or (
            self.high is not None and parsed > self.high
        )
        if outside or (self.choices and parsed not in self.choices):
            raise self._wrong(value)
        return parsed

    def _wrong(self, value: Any) -> UsageError:
        return UsageError(f"{self.name}={str(value)[:_SHOWN]}: expected {self.allowed()}")


def param(
    default: Any,
    doc: str,
    *,
    choices: Sequence[Any] | None = None,
    low: float | None = None,
    high: float | None = None,
    rare: bool = False,
    counts: bool = False,
) -> Any:
    """Declare a parameter as a dataclass field.

    A rare one is recorded only where it is not the default: for a parameter that came after runs
    without it, so that they stay what they are. One that `counts` takes a number of tokens too.
    """
    metadata = {
        "doc": doc,
        "choices": tuple(choices) if choices is not None else None,
        "low": low,
        "high": high,
        "rare": rare,
        "counts": counts,
    }
    return field(default=default, metadata=metadata)


def param_specs(cls: type) -> dict[str, ParamSpec]:
    """Return the parameters a dataclass declares with `param`, by name; other classes have none."""
    declared = fields(cls) if is_dataclass(cls) else ()
    return {f.name: _spec(f) for f in declared if "doc" in f.metadata}


def _spec(f: Field[Any]) -> ParamSpec:
    default = None if f.default is MISSING else f.default
    return ParamSpec(name=f.name, type=type(default), default=default, **f.metadata)


def parse_settings(owner: str, cls: type, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Check `settings` against the parameters of `cls` and return them typed.

    Raises
    ------
    UsageError
        For an unknown key (near match named) or a value out of range.
    """
    specs = param_specs(cls)
    for key in settings:
        if key not in specs:
            raise unknown_name(f"{owner} parameter", key, specs)
    return {key: specs[key].parse(value) for key, value in settings.items()}
