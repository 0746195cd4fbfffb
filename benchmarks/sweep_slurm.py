"""A Slurm of one machine: `sbatch`, `srun`, `sacct`, `scancel` that really run their jobs.

    python benchmarks/sweep_slurm.py FOLDER     # makes the commands; put FOLDER on PATH

Enough of each for submitit: jobs start at once, each in a process group of its own; what is not
understood is ignored. State is kept in FOLDER/jobs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

COMMANDS = ("sbatch", "srun", "sacct", "scancel", "squeue")
ENDED = ("COMPLETED", "FAILED", "CANCELLED")


def install(folder: Path) -> None:
    """Make the commands in a folder."""
    (folder / "jobs").mkdir(parents=True, exist_ok=True)
    for name in COMMANDS:
        path = folder / name
        path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__)}" {name} "$@"\n')
        path.chmod(0o755)


def _jobs() -> Path:
    return Path(os.environ["FAKE_SLURM"]) / "jobs"


def sbatch(arguments: list[str]) -> int:
    script = Path(arguments[-1])
    number = str(1000 + len(list(_jobs().glob("*.job"))))
    while True:
        try:
            (_jobs() / f"{number}.job").touch(exist_ok=False)
            break
        except FileExistsError:
            number = str(int(number) + 1)
    environment = {
        "SLURM_JOB_ID": number, "SLURM_NTASKS": "1", "SLURM_JOB_NUM_NODES": "1",
        "SLURM_NODEID": "0", "SLURM_JOB_NODELIST": os.uname().nodename, "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
    }  # fmt: skip
    copy = _jobs() / f"{number}.sh"
    copy.write_text(script.read_text())
    shell = f"echo $$ > {_jobs()}/{number}.pid; bash {copy}; echo $? > {_jobs()}/{number}.rc"
    with Path(os.devnull).open("r+b") as null:
        subprocess.Popen(
            ["sh", "-c", shell], env={**os.environ, **environment}, start_new_session=True,
            stdin=null, stdout=null, stderr=null,
        )  # fmt: skip
    sys.stdout.write(f"Submitted batch job {number}\n")
    return 0


def srun(arguments: list[str]) -> int:
    output = error = os.devnull
    while arguments and arguments[0].startswith("--"):
        option = arguments.pop(0)
        if option in ("--output", "--error"):
            place = arguments.pop(0).replace("%j", os.environ["SLURM_JOB_ID"]).replace("%t", "0")
            output, error = (place, error) if option == "--output" else (output, place)
    with Path(output).open("ab") as out, Path(error).open("ab") as err:
        return subprocess.run(arguments, stdout=out, stderr=err, check=False).returncode


def _state(number: str) -> str:
    if (_jobs() / f"{number}.cancelled").exists():
        return "CANCELLED"
    try:
        return "FAILED" if int((_jobs() / f"{number}.rc").read_text()) else "COMPLETED"
    except (FileNotFoundError, ValueError):
        return "RUNNING"


def sacct(arguments: list[str]) -> int:
    wanted = [arguments[at + 1] for at, word in enumerate(arguments) if word == "-j"]
    lines = [f"{number}|{_state(number)}|{os.uname().nodename}" for number in wanted]
    sys.stdout.write("\n".join(["JobID|State|NodeList", *lines]) + "\n")
    return 0


def scancel(arguments: list[str]) -> int:
    for number in (each for each in arguments if each.isdecimal()):
        if _state(number) in ENDED:
            continue
        try:
            group = int((_jobs() / f"{number}.pid").read_text())
            os.killpg(group, signal.SIGTERM)
            time.sleep(0.1)
        except (FileNotFoundError, ValueError, ProcessLookupError):
            pass
        (_jobs() / f"{number}.cancelled").touch()
    return 0


def main() -> int:
    """Be one of the commands, or make them."""
    if sys.argv[1] in COMMANDS:
        act = {"sbatch": sbatch, "srun": srun, "sacct": sacct, "scancel": scancel}
        return act[sys.argv[1]](sys.argv[2:]) if sys.argv[1] in act else 0
    install(Path(sys.argv[1]).resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
