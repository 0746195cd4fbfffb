"""Write the locks of the environments again: the same pins, or others, with hashes of every file.

    pip install uv
    python benchmarks/renew_locks.py                              # all locks, same pins
    python benchmarks/renew_locks.py bfcl --set filelock==4.2.11  # another version
    python benchmarks/renew_locks.py vllm-cuda --resolve vllm==0.32.0 --set 'setuptools>=83'
    python benchmarks/renew_locks.py --newer                      # pins that are not the newest

A lock is its own source: comments and pins stay, hashes are asked of the package index that uv is
configured for. `--resolve` drops the pins and finds those of a requirement, for Linux on x86-64 and
ARM and every Python the profile takes; what differs between them gets a marker. `--wheel FILE` is
for a pin that the index does not have, such as torch's build for the CPU: the hash is that file's.

Afterwards: look for advisories (docs/supply-chain.md), build what changed
(`kvbench env create NAME`), run its tests.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

from agentbench_kv.environments.profiles import PROFILES, Profile

QUIET = ("--no-header", "--no-annotate", "--no-emit-index-url", "--no-config", "--quiet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", default=sorted(PROFILES), help="locks; all if none")
    parser.add_argument(
        "--set", action="append", default=[], metavar="REQ", help="another pin, or one more"
    )
    parser.add_argument("--resolve", metavar="REQ", help="drop the pins and resolve this")
    parser.add_argument("--wheel", action="append", default=[], type=Path, metavar="FILE")
    parser.add_argument("--newer", action="store_true", help="only print what is not the newest")
    args = parser.parse_args()
    for name in args.names:
        profile = PROFILES[name]
        comments, pins = read(profile.lock)
        if args.newer:
            print(f"{name}: {', '.join(newer(profile, pins)) or 'all pins are the newest'}")
            continue
        chosen = {canonicalize_name(Requirement(text).name): text for text in args.set}
        if args.resolve:
            body = resolved(profile, args.resolve, list(chosen.values()))
        else:
            kept = [pin for pin in pins if canonicalize_name(Requirement(pin).name) not in chosen]
            body = hashed(profile, [*kept, *chosen.values()], args.wheel)
        profile.lock.write_text("\n".join([*comments, *body, ""]), encoding="utf-8")
        print(f"{profile.lock}: {sum(line[0] != ' ' for line in body)} pins")


def read(lock: Path) -> tuple[list[str], list[str]]:
    """Return the comments of a lock, and its pins without hashes."""
    lines = lock.read_text("utf-8").splitlines()
    pins = [re.sub(r"\s*\\$", "", line) for line in lines if line and line[0] not in "# "]
    return [line for line in lines if line.startswith("#")], pins


def newer(profile: Profile, pins: Sequence[str]) -> Iterator[str]:
    """Yield pins for which the index has a newer version that the oldest Python takes."""
    names = sorted({Requirement(pin).name for pin in pins})
    latest = {Requirement(line).name: line for line in uv(profile, names, "--no-deps")}
    for pin in map(Requirement, pins):
        found = latest.get(canonicalize_name(pin.name), "")
        if found and not pin.specifier.contains(found.partition("==")[2].split()[0]):
            yield f"{pin.name}{pin.specifier} ({found.partition('==')[2]})"


def hashed(profile: Profile, pins: Sequence[str], wheels: Sequence[Path]) -> list[str]:
    folders = [f"--find-links={wheel.parent}" for wheel in wheels]
    body = uv(profile, pins, "--no-deps", "--generate-hashes", "--universal", *folders)
    for wheel in wheels:
        body = with_wheel(body, wheel)
    return body


def resolved(profile: Profile, requirement: str, limits: Sequence[str]) -> list[str]:
    """Resolve a requirement within `limits`, and leave out what no Linux of ours installs."""
    blocks: list[list[str]] = []
    for line in uv(profile, [requirement], "--generate-hashes", "--universal", limits=limits):
        if line.startswith(" "):
            blocks[-1].append(line)
        else:
            blocks.append([line])
    wanted = (block for block in blocks if installed(profile, block[0]))
    return [line for block in wanted for line in block]


def installed(profile: Profile, pin: str) -> bool:
    marker = re.sub(r"\s*\\$", "", pin).partition(";")[2].strip()
    return not marker or any(map(Marker(marker).evaluate, environments(profile)))


def environments(profile: Profile) -> Iterator[dict[str, str]]:
    linux = {
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "extra": "",
    }
    for minor in range(profile.oldest[1], profile.newest[1] + 1):
        for machine in ("x86_64", "aarch64"):
            python = {"python_version": f"3.{minor}", "python_full_version": f"3.{minor}.9"}
            yield {**linux, **python, "platform_machine": machine}


def uv(
    profile: Profile, requirements: Sequence[str], *options: str, limits: Sequence[str] = ()
) -> list[str]:
    """Return what `uv pip compile` prints for the oldest Python of a profile."""
    python = ".".join(map(str, profile.oldest))
    with tempfile.TemporaryDirectory() as folder:
        wanted, within = Path(folder) / "wanted.in", Path(folder) / "limits.in"
        wanted.write_text("\n".join(requirements))
        within.write_text("\n".join(limits))
        command = ["uv", "pip", "compile", *QUIET, "--python-version", python, *options]
        command += ["--constraint", str(within), str(wanted)]
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode:
        raise SystemExit(f"{profile.name}: {found.stderr.strip()}")
    return found.stdout.splitlines()


def with_wheel(body: Sequence[str], wheel: Path) -> list[str]:
    """Add the hash of a wheel to the pin of its very version; the rest stays as it is."""
    name, version, _, _ = parse_wheel_filename(wheel.name)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    lines: list[str] = []
    for line in body:
        if line.split(" ")[0] == f"{name}=={version}":
            lines += [f"{line} \\", f"    --hash=sha256:{digest}"]
        else:
            lines.append(line)
    return lines


if __name__ == "__main__":
    main()
