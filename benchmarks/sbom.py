"""Write FOLDER/agentbench_kv-VERSION.cdx.json: the package and what it needs, as installed here.

    python benchmarks/sbom.py FOLDER

CycloneDX, made by cyclonedx-py from this interpreter's packages, without those that the package
does not need (tools for development, optional extras).
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PACKAGE = "agentbench-kv"


def needed(name: str, extras: frozenset[str], found: dict[str, frozenset[str]]) -> None:
    """Add a distribution, with the extras asked of it, and all that they require."""
    key = canonicalize_name(name)
    if key in found and extras <= found[key]:
        return
    try:
        requires = distribution(name).requires or []
    except PackageNotFoundError:
        if key in MAY_BE_ABSENT:
            return
        raise SystemExit(
            f"{name} is required and not installed: install the package first"
        ) from None
    found[key] = found.get(key, frozenset()) | extras
    for text in requires:
        wanted = Requirement(text)
        given = [{"extra": extra} for extra in ("", *extras)]
        if wanted.marker is None or any(map(wanted.marker.evaluate, given)):
            needed(wanted.name, frozenset(wanted.extras), found)


# What a build of torch for the CPU names and does not need there.
MAY_BE_ABSENT = frozenset({"triton", "cuda-toolkit", "cuda-bindings"})


def main(folder: Path) -> None:
    found: dict[str, frozenset[str]] = {}
    needed(PACKAGE, frozenset(), found)
    command = ("cyclonedx-py", "environment", "--output-reproducible", "--of", "JSON")
    made = subprocess.run((*command, sys.executable), check=True, capture_output=True).stdout
    bom: dict[str, Any] = json.loads(made)
    named = {canonicalize_name(each["name"]): each for each in bom["components"]}
    kept = [each for name, each in named.items() if name in found]
    refs = {each["bom-ref"] for each in kept}
    own = named[PACKAGE]
    own.pop("externalReferences", None)  # the folder it was installed from
    bom["components"] = [each for each in kept if each is not own]
    bom["metadata"]["component"] = own
    bom["dependencies"] = [
        {**each, "dependsOn": sorted(refs & set(each.get("dependsOn", ())))}
        for each in bom["dependencies"]
        if each["ref"] in refs
    ]
    path = folder / f"agentbench_kv-{own['version']}.cdx.json"
    path.write_text(json.dumps(bom, indent=1) + "\n", encoding="utf-8")
    print(f"{path}: {len(bom['components'])} components")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
