"""A folder of measurements: the plan, a file for each measurement, a summary."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic, writing
from agentbench_kv.results.serving.records import Measurement, ServingPlan
from agentbench_kv.results.tables.model import slug

PLAN = "serving.json"
SUMMARY = "summary.json"


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
        document = {**plan.model_dump(), "provenance": dict(provenance)}
        write_atomic(path / PLAN, json_bytes(document, indent=2))
        return cls(path, plan, provenance)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Open a folder; a UsageError if it holds no plan that can be read."""
        document = _read_json(path / PLAN)
        provenance = document.pop("provenance", {})
        try:
            return cls(path, ServingPlan.model_validate(document), provenance)
        except ValidationError as error:
            raise UsageError(f"{path / PLAN}: {_first(error)}") from error

    def add(self, measurement: Measurement) -> Path:
        """Write a measurement; return its file."""
        name = slug(measurement.arm, measurement.shape, measurement.load)
        path = self.path / f"rep{measurement.repetition + 1:02d}-{name}.json"
        write_atomic(path, json_bytes(measurement.document(), indent=2))
        return path

    def measurements(self) -> list[Measurement]:
        """Return all measurements, by file name; a UsageError if a file is not one."""
        found = []
        for path in sorted(self.path.glob("rep*.json")):
            try:
                found.append(Measurement.from_document(_read_json(path)))
            except ValidationError as error:
                raise UsageError(f"{path}: {_first(error)}") from error
        return found

    def write_summary(self, document: Mapping[str, Any]) -> None:
        """Replace the summary."""
        write_atomic(self.path / SUMMARY, json_bytes(document, indent=2))


def serving_folders(paths: Iterable[Path]) -> list[Path]:
    """Return the folders of measurements at or directly below some paths, each once."""
    found: dict[Path, None] = {}
    for path in paths:
        own = [path] if (path / PLAN).is_file() else []
        below = sorted(each.parent for each in path.glob(f"*/{PLAN}")) if path.is_dir() else []
        found |= dict.fromkeys([*own, *below])
    return list(found)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise UsageError(f"{path} holds no JSON object")
    return document


def _first(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False)[0]
    return f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
