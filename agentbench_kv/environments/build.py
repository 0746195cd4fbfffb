"""Build one environment: a virtual environment, pip from the lock, a probe, then the marker."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from agentbench_kv.environments.locations import Report, home, interpreter
from agentbench_kv.environments.profiles import BuiltWheel, Profile, export
from agentbench_kv.errors import PrerequisiteError

# Runs a command with additions to the environment; raises if it fails.
Run = Callable[[Sequence[str], Mapping[str, str]], None]


def cached_wheel(wanted: BuiltWheel) -> Path | None:
    """Return the wheel that was built on such a processor before, if there is one."""
    return next(iter(sorted(_folder(wanted).glob("*.whl"))), None)


def wheel_of(wanted: BuiltWheel, python: Path, run: Run, report: Report) -> Path:
    """Return the wheel, building it with the pip of `python` if this machine has not yet."""
    folder = _folder(wanted)
    if (found := cached_wheel(wanted)) is not None:
        report(f"using {found}")
        return found
    missing = [tool for tool in wanted.tools if shutil.which(tool) is None]
    if missing:
        raise PrerequisiteError(
            f"building {wanted.requirement} needs {', '.join(missing)}; install it, for example "
            f"with the system's package manager"
        )
    report(f"building {wanted.requirement}, once: about {wanted.minutes} minutes on two cores")
    folder.mkdir(parents=True, exist_ok=True)
    pip = [str(python), "-I", "-m", "pip", "wheel", "--no-input", "--disable-pip-version-check"]
    # The build backend is in the lock.
    source = ["--no-deps", "--no-build-isolation", "--no-binary", wanted.distribution]
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder) as place:
        pin = Path(place) / "pin.txt"
        pin.write_text(f"{wanted.requirement} --hash=sha256:{wanted.sha256}\n", encoding="utf-8")
        settings = _with_cmake(wanted, Path(place))
        run([*pip, *source, *_HASHED, "--wheel-dir", place, "-r", str(pin)], settings)
        (made,) = Path(place).glob("*.whl")
        return made.rename(folder / made.name)


def _with_cmake(wanted: BuiltWheel, place: Path) -> Mapping[str, str]:
    """Return the build's settings, with the files that CMake projects begin with in `place`."""
    settings = dict(wanted.settings)
    for number, (project, code) in enumerate(sorted(wanted.cmake.items())):
        file = place / f"begin-{number}.cmake"
        file.write_text(code, encoding="utf-8")
        # Split by the build backend as a shell would.
        more = shlex.quote(f"-DCMAKE_PROJECT_{project}_INCLUDE={file}")
        settings["CMAKE_ARGS"] = f"{settings.get('CMAKE_ARGS', '')} {more}".strip()
    return settings


def _folder(wanted: BuiltWheel) -> Path:
    """Return where the wheel is kept: code for one processor may not run on another."""
    digest = hashlib.sha256(wanted.pinned() + _processor().encode()).hexdigest()
    return home() / "wheels" / f"{wanted.distribution}-{wanted.version}-{digest[:12]}"


def _processor() -> str:
    """Name the machine and the instruction sets of its processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.system()} {platform.machine()} {os.name} {flags}"


Version = tuple[int, int]


def find_python(oldest: Version, newest: Version) -> Path:
    """Return a Python of a version from `oldest` to `newest`: kvbench's own if it is one.

    Else the first that runs of `python3.N` on the PATH and of pyenv's versions, older ones first;
    kvbench's own interpreter if there is none at all.
    """
    own = Path(sys.executable)
    if oldest <= sys.version_info[:2] <= newest:
        return own
    for candidate in _candidates(oldest, newest):
        found = version_of(candidate)
        if found is not None and oldest <= found <= newest:
            return candidate
    return own


def version_of(python: Path) -> Version | None:
    """Return the version of an interpreter, `(major, minor)`; None if it does not run."""
    code = "import sys; print(sys.version_info[0], sys.version_info[1])"
    command = (str(python), "-I", "-c", code)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    numbers = run.stdout.split()
    return (int(numbers[0]), int(numbers[1])) if run.returncode == 0 else None


def version_there(python: Path, distribution: str) -> str:
    """Return which version of a distribution an interpreter has; empty where it has none."""
    code = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    command = (str(python), "-c", code, distribution)
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def _candidates(oldest: Version, newest: Version) -> Iterator[Path]:
    names = [f"{newest[0]}.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    for name in names:
        if found := shutil.which(f"python{name}"):
            yield Path(found)
    root = Path(os.environ.get("PYENV_ROOT") or "~/.pyenv").expanduser()
    for name in names:
        yield from sorted(root.glob(f"versions/{name}.*/bin/python"))


MARKER_FILE = "kvbench-environment.json"


@dataclass(frozen=True)
class Marker:
    """What a finished environment holds."""

    name: str
    lock_sha256: str  # of the lock it was built from
    python: str  # `major.minor`
    packages: dict[str, str]  # distribution name to version
    source: str = ""  # what was installed from a repository

    def write(self, folder: Path) -> None:
        draft = folder / f"{MARKER_FILE}.part"
        draft.write_text(json.dumps(asdict(self), indent=1, sort_keys=True), encoding="utf-8")
        draft.replace(folder / MARKER_FILE)


def read_marker(folder: Path) -> Marker | None:
    """Return the marker of `folder`, or None if the environment is unfinished."""
    try:
        fields = json.loads((folder / MARKER_FILE).read_text(encoding="utf-8"))
        marker = Marker(**fields)
    except (OSError, ValueError, TypeError, RecursionError):
        return None
    return marker if isinstance(marker.packages, dict) else None


_PIP = ("-I", "-m", "pip", "install", "--no-input", "--disable-pip-version-check")
_NO_DEPS = ("--no-deps",)
_HASHED = ("--require-hashes",)
_WHEELS_ONLY = ("--only-binary", ":all:")

# The build backend is in the lock.
_FROM_FOLDER = ("--no-build-isolation", "--no-index")

# Settings that would send packages, or the interpreter's search path, somewhere else.
_MISLEADING = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__",
    "PIP_TARGET", "PIP_PREFIX", "PIP_ROOT", "PIP_USER", "PIP_REQUIRE_VIRTUALENV",
)  # fmt: skip

_LIST_PACKAGES = (
    "import importlib.metadata as m, json;"
    "print(json.dumps({d.name: d.version for d in m.distributions()}))"
)

_TAIL_LINES = 8
_PIP_WARNING = ("WARNING: ", "DEPRECATION: ")


def build(profile: Profile, folder: Path, python: Path, report: Report, exported: str = "") -> None:
    """Build `profile` in `folder` from `python`, picking up what an interrupted build left.

    `exported` is what `fetch` returned.
    """
    version = supported_version(profile, python)
    free_mb = shutil.disk_usage(folder.parent).free >> 20
    if free_mb < profile.disk_mb:
        raise _disk_full(profile, folder, f"{free_mb} MB free")
    log = folder.with_name(f"{folder.name}.log")
    log.unlink(missing_ok=True)
    own = interpreter(folder)

    def run(command: Sequence[str], settings: Mapping[str, str] | None = None) -> None:
        _step(profile, log, command, report, settings or {})

    if not own.exists() or version_of(own) != version:
        shutil.rmtree(folder, ignore_errors=True)
        report(f"creating {folder}")
        run((str(python), "-m", "venv", str(folder)))
    report(f"installing {profile.lock.name} (log: {log})")
    run((str(own), *_PIP, *_NO_DEPS, *_HASHED, *_WHEELS_ONLY, "-r", str(profile.lock)))
    if exported:
        report(f"installing {profile.name} from {exported}")
        run((str(own), *_PIP, *_NO_DEPS, *_FROM_FOLDER, str(_exported(folder))))
    if profile.built is not None:
        wheel = wheel_of(profile.built, own, run, report)
        run((str(own), *_PIP, *_NO_DEPS, "--no-index", str(wheel)))
    if profile.finish:
        run((str(own), "-I", "-c", profile.finish))
    report("checking that it works")
    run((str(own), "-I", "-c", profile.probe))
    _write_marker(profile, folder, version, exported)


def probe(profile: Profile, python: Path) -> str | None:
    """Run the profile's probe under `python`; return what went wrong, or None."""
    command, own = (str(python), "-I", "-c", profile.probe), _clean_environment()
    try:
        run = subprocess.run(command, env=own, capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    return None if run.returncode == 0 else lines[-1]


def _exported(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}-source")


def fetch(profile: Profile, folder: Path, source: str | None) -> str:
    """Get the profile's own package, if it has one; return what was got.

    `source` is a git URL, a git directory or a directory; PrerequisiteError if it is not there, or
    the profile has no package of its own.
    """
    if profile.source is None:
        if source:
            raise PrerequisiteError(f"{profile.name} takes no --from: its lock is complete")
        return ""
    return export(profile.source, source, _exported(folder))


def _clean_environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k not in _MISLEADING}


def supported_version(profile: Profile, python: Path) -> tuple[int, int]:
    """Return the version of an interpreter; PrerequisiteError if the pins have no wheels for it."""
    version = version_of(python)
    if version is None:
        raise PrerequisiteError(
            f"{python} does not run; name a working Python: "
            f"{profile.create_command()} --python /path/to/python"
        )
    if not profile.oldest <= version <= profile.newest:
        ends = sorted({profile.oldest, profile.newest})
        wanted = " to ".join(f"{major}.{minor}" for major, minor in ends)
        raise PrerequisiteError(
            f"{python} is Python {version[0]}.{version[1]}, but the pins of {profile.name} have "
            f"wheels for {wanted}: {profile.create_command()} --python /path/to/python"
        )
    return version


def _disk_full(profile: Profile, folder: Path, found: str) -> PrerequisiteError:
    return PrerequisiteError(
        f"disk full at {folder.parent}: {found}, {profile.name} needs {profile.disk_mb} MB; "
        "free some space or set KVBENCH_HOME to another disk, then run the command again"
    )


def _step(
    profile: Profile, log: Path, command: Sequence[str], report: Report, settings: Mapping[str, str]
) -> None:
    """Run one command of a build; PrerequisiteError with the last lines of the log if it fails.

    pip's warnings stay in the log: it repeats them for every package.
    """
    try:
        code, tail = _run_logged(command, log, report, settings)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise _disk_full(profile, log, "none left") from error
        raise
    if code == 0:
        return
    last = "\n".join(tail)
    if os.strerror(errno.ENOSPC) in last:
        raise _disk_full(profile, log, "none left")
    raise PrerequisiteError(
        f"building {profile.name} failed (exit code {code}); last lines of {log}:\n{last}\n"
        f"mend the cause, then run again: {profile.create_command()}"
    )


def _run_logged(
    command: Sequence[str], log: Path, report: Report, settings: Mapping[str, str]
) -> tuple[int, deque[str]]:
    tail: deque[str] = deque(maxlen=_TAIL_LINES)
    warnings = 0
    with (
        log.open("a", encoding="utf-8") as out,
        subprocess.Popen(
            command,
            env=_clean_environment() | dict(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as process,
    ):
        for line in process.stdout or ():
            out.write(line)
            out.flush()
            if "pip" in command and line.startswith(_PIP_WARNING):
                warnings += 1
                continue
            tail.append(line.rstrip())
            report(f"  {line.rstrip()}")
    if warnings:
        report(f"  {warnings} {'warning' if warnings == 1 else 'warnings'} of pip: {log}")
    return process.returncode, tail


def _write_marker(
    profile: Profile, folder: Path, version: tuple[int, int], source: str = ""
) -> None:
    command = (str(interpreter(folder)), "-I", "-c", _LIST_PACKAGES)
    listing = subprocess.run(command, capture_output=True, text=True, check=True)
    packages = json.loads(listing.stdout)
    python = f"{version[0]}.{version[1]}"
    Marker(profile.name, profile.lock_sha256(), python, packages, source).write(folder)
