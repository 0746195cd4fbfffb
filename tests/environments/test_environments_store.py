"""Creating, checking and removing environments, with a lock of one tiny wheel."""

import hashlib
import json
import os
import re
import shutil
import socket
import sys
import sysconfig
import threading
import venv
import zipfile
from pathlib import Path

import pytest

from agentbench_kv import environments
from agentbench_kv.environments import build, locations, profiles, store
from agentbench_kv.environments.build import MARKER_FILE, read_marker
from agentbench_kv.environments.profiles import PROFILES, Profile
from agentbench_kv.errors import PrerequisiteError, UsageError

HERE = sys.version_info[:2]


def make_wheel(folder, code="VALUE = 1\n"):
    wheel = folder / "tinything-1.0-py3-none-any.whl"
    info = "tinything-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tinything.py", code)
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tinything\nVersion: 1.0\n"
        )
        tags = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        archive.writestr(f"{info}/WHEEL", tags)
        archive.writestr(f"{info}/RECORD", "")
    return wheel


def make_profile(folder, lock_text=None, **changes):
    lock = folder / "tiny.txt"
    if lock_text is None:
        wheel = make_wheel(folder)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lock_text = f"{wheel} --hash=sha256:{digest}\n"
    lock.write_text(lock_text)
    fields = {
        "name": "tiny", "summary": "a test", "lock": lock, "oldest": HERE, "newest": HERE,
        "disk_mb": 1, "probe": "import tinything; assert tinything.VALUE == 1",
    }  # fmt: skip
    return Profile(**(fields | changes))


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """Register the profile `tiny` and give it an empty home."""
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("KVBENCH_ENV_TINY", raising=False)

    def register(**changes):
        made = make_profile(tmp_path, **changes)
        monkeypatch.setitem(PROFILES, "tiny", made)
        return made

    return register


@pytest.fixture
def no_building(monkeypatch):
    monkeypatch.setattr(build, "_run_logged", lambda *_: pytest.fail("something was built"))


def pretend_ready(profile):
    """Put in place what a finished build leaves, with this interpreter."""
    folder = locations.folder_of(profile)
    # A real one: pip refuses to install for a distribution's own Python (PEP 668).
    venv.create(folder, symlinks=True)
    places = {"base": str(folder), "platbase": str(folder)}
    own = Path(sysconfig.get_path("purelib", "venv", places))
    (own / "here.pth").write_text(sysconfig.get_path("purelib"))  # pip, and kvbench
    build._write_marker(profile, folder, HERE)
    return folder


@pytest.mark.slow
def test_life_of_an_environment(tiny):
    profile = tiny()
    with pytest.raises(PrerequisiteError, match="tiny environment not found; create it with: "):
        environments.python_of("tiny")
    lines = []
    made = environments.create("tiny", report=lines.append)
    assert made.state == "ready"
    assert made.packages["tinything"] == "1.0"
    assert any("installing" in line for line in lines)
    assert environments.python_of("tiny") == made.python
    assert environments.check("tiny").state == "ready"

    # An interrupted build is picked up without a new virtual environment.
    folder = locations.folder_of(profile)
    (folder / MARKER_FILE).unlink()
    assert environments.check("tiny").state == "unfinished"
    witness = folder / "witness"
    witness.touch()
    assert environments.create("tiny").state == "ready"
    assert witness.exists()

    assert environments.remove("tiny") == [folder]
    assert environments.check("tiny").state == "missing"
    assert environments.remove("tiny") == []


def test_a_package_of_another_hash_is_not_installed(tiny, tmp_path):
    profile = tiny()
    make_wheel(tmp_path, code="VALUE = 1  # and more\n")
    with pytest.raises(PrerequisiteError, match="DO NOT MATCH THE HASHES"):
        environments.create("tiny")
    assert environments.check("tiny").state != "ready"
    assert not list(locations.folder_of(profile).rglob("tinything.py"))
    tiny(lock_text=f"{make_wheel(tmp_path)}\n")
    with pytest.raises(PrerequisiteError, match="Hashes are required"):
        environments.create("tiny")


@pytest.mark.usefixtures("no_building")
def test_ready_environment_is_left_alone(tiny):
    pretend_ready(tiny())
    assert environments.create("tiny").state == "ready"


def test_marker_whose_interpreter_is_gone_does_not_count(tiny, monkeypatch):
    profile = tiny()
    folder = pretend_ready(profile)
    (folder / "bin" / "python").unlink()
    assert environments.check("tiny").state == "unfinished"
    states = []

    def rebuild(*_):
        states.append(environments.check("tiny").state)
        shutil.rmtree(folder)
        pretend_ready(profile)

    monkeypatch.setattr(store.builder, "build", rebuild)
    assert environments.create("tiny").state == "ready"
    assert states == ["building"]


def test_failing_pip_shows_its_last_lines_and_the_log(tiny, tmp_path):
    # pip is asked for a file that is not there, so nothing is installed anywhere.
    folder = pretend_ready(tiny(lock_text=f"{tmp_path}/absent-1.0-py3-none-any.whl\n"))
    (folder / MARKER_FILE).unlink()
    with pytest.raises(PrerequisiteError, match="building tiny failed") as caught:
        environments.create("tiny")
    message = str(caught.value)
    assert "absent-1.0" in message
    assert "kvbench env create tiny" in message
    log = next((tmp_path / "home" / "envs").glob("*.log"))
    assert str(log) in message
    assert "absent-1.0" in log.read_text()
    assert environments.check("tiny").state == "unfinished"


SAYS = """
for n in range(40):
    print(f"Collecting package-{n}")
    print(f"WARNING: Location 'file:///nowhere/package-{n}/' is ignored")
print("  WARNING: of what pip runs")
print("ERROR: package-40 is not to be had")
raise SystemExit(3)
"""


@pytest.mark.parametrize("pip", [True, False])
def test_warnings_of_pip_are_in_the_log_alone(tiny, tmp_path, pip):
    lines, log = [], tmp_path / "tiny.log"
    command = (sys.executable, "-I", "-c", SAYS, *(["pip"] if pip else []))
    with pytest.raises(PrerequisiteError, match="package-40 is not to be had") as caught:
        build._step(tiny(), log, command, lines.append, {})
    assert log.read_text().count("\nWARNING: ") == 40
    shown = [line for line in lines if line.startswith("  WARNING: ")]
    assert len(shown) == (0 if pip else 40)
    assert sum("Collecting" in line for line in lines) == 40
    assert (f"  40 warnings of pip: {log}" in lines) is pip
    # What went wrong is not pushed out of the last lines.
    assert str(caught.value).count("Collecting") == (6 if pip else 3)
    assert "    WARNING: of what pip runs" in lines


def test_failing_probe_leaves_no_marker(tiny, monkeypatch):
    profile = tiny(probe="raise SystemExit('it does not work')")
    folder = pretend_ready(profile)
    assert environments.check("tiny").state == "broken"
    assert environments.check("tiny").detail == "it does not work"
    assert "--recreate" in environments.check("tiny").mend
    (folder / MARKER_FILE).unlink()
    real = build._run_logged
    skip_install = lambda command, *rest: (0, []) if "pip" in command else real(command, *rest)  # noqa: E731
    monkeypatch.setattr(build, "_run_logged", skip_install)
    with pytest.raises(PrerequisiteError, match="it does not work"):
        environments.create("tiny")
    assert read_marker(folder) is None


@pytest.mark.usefixtures("no_building")
def test_another_lock_is_another_folder(tiny):
    old = pretend_ready(tiny())
    new = tiny(lock_text="something==2\n")
    assert locations.folder_of(new) != old
    found = environments.check("tiny")
    assert found.state == "outdated"
    assert str(old) in found.detail
    with pytest.raises(PrerequisiteError, match="outdated; create it with: kvbench env create"):
        environments.python_of("tiny")
    assert environments.remove("tiny") == [old]


@pytest.mark.usefixtures("no_building")
def test_full_disk_before_building(tiny):
    tiny(disk_mb=1 << 40)
    with pytest.raises(PrerequisiteError, match=r"disk full at .*set KVBENCH_HOME"):
        environments.create("tiny")


def test_full_disk_while_building(tiny, monkeypatch):
    tiny()
    tail = ["ERROR: Could not install: [Errno 28] No space left on device"]
    monkeypatch.setattr(build, "_run_logged", lambda *_: (1, tail))
    with pytest.raises(PrerequisiteError, match="disk full"):
        environments.create("tiny")


@pytest.mark.usefixtures("no_building")
def test_python_that_does_not_run(tiny):
    tiny()
    with pytest.raises(PrerequisiteError, match=r"/no/such/python does not run; .*--python"):
        environments.create("tiny", python="/no/such/python")


@pytest.mark.usefixtures("no_building")
def test_python_without_wheels(tiny):
    tiny(oldest=(3, 2), newest=(3, 3))
    with pytest.raises(PrerequisiteError, match=r"have wheels for 3\.2 to 3\.3"):
        environments.create("tiny")


def test_home_that_cannot_be_written(tiny, monkeypatch, tmp_path):
    tiny()
    (tmp_path / "file").touch()
    monkeypatch.setenv("KVBENCH_HOME", str(tmp_path / "file"))
    with pytest.raises(PrerequisiteError, match=r"cannot write to .*KVBENCH_HOME"):
        environments.create("tiny")


@pytest.mark.usefixtures("no_building")
def test_own_interpreter(tiny, monkeypatch):
    tiny(probe="import json")
    monkeypatch.setenv("KVBENCH_ENV_TINY", sys.executable)
    assert environments.python_of("tiny") == Path(sys.executable)
    found = environments.check("tiny")
    assert (found.state, found.source) == ("ready", "KVBENCH_ENV_TINY")
    tiny(probe="import surely_not_there")
    found = environments.check("tiny")
    assert found.state == "broken"
    assert found.mend == "unset KVBENCH_ENV_TINY; kvbench env create tiny"


def test_own_interpreter_that_is_none(tiny, monkeypatch, tmp_path):
    tiny()
    monkeypatch.setenv("KVBENCH_ENV_TINY", str(tmp_path))
    with pytest.raises(PrerequisiteError, match=r"KVBENCH_ENV_TINY=.* is not an executable"):
        environments.python_of("tiny")


def test_second_builder_waits_and_finds_it_ready(tiny, monkeypatch):
    profile = tiny()
    started, go_on, built, said = threading.Event(), threading.Event(), [], []

    def slow_build(*_):
        started.set()
        go_on.wait(60)
        built.append(1)
        pretend_ready(profile)

    monkeypatch.setattr(store.builder, "build", slow_build)
    first = threading.Thread(target=environments.create, args=("tiny",))
    first.start()
    assert started.wait(60)
    who = f"pid {os.getpid()} on {socket.gethostname()}"
    (found,) = [each for each in environments.list_environments() if each.name == "tiny"]
    assert (found.state, who in found.detail) == ("building", True)
    with pytest.raises(PrerequisiteError, match="tiny environment being built; create it with"):
        environments.python_of("tiny")

    def report(line):
        said.append(line)
        go_on.set()

    assert environments.create("tiny", report=report).state == "ready"
    first.join()
    assert built == [1]
    assert said == [f"another process is working on tiny ({who}); waiting for it"]


def test_a_lock_that_nobody_holds_is_an_interrupted_build(tiny):
    folder = pretend_ready(tiny())
    (folder / MARKER_FILE).unlink()
    with locations.building("tiny", print):
        assert environments.check("tiny").state == "building"
    assert environments.check("tiny").state == "unfinished"


def test_recreate_starts_from_nothing(tiny, monkeypatch):
    profile = tiny()
    (pretend_ready(profile) / "old").touch()
    monkeypatch.setattr(store.builder, "build", lambda *_: pretend_ready(profile))
    environments.create("tiny", recreate=True)
    assert not (locations.folder_of(profile) / "old").exists()


@pytest.mark.usefixtures("no_building")
def test_recreate_with_a_wrong_python_deletes_nothing(tiny):
    folder = pretend_ready(tiny(oldest=(3, 2), newest=(3, 3)))
    with pytest.raises(PrerequisiteError, match=r"have wheels for 3\.2 to 3\.3: .* tiny --py"):
        environments.create("tiny", recreate=True)
    assert (folder / MARKER_FILE).exists()


def test_damaged_marker_is_no_marker(tiny):
    folder = pretend_ready(tiny())
    (folder / MARKER_FILE).write_text('{"name": ')
    assert environments.check("tiny").state == "unfinished"
    fields = {"name": "tiny", "lock_sha256": "", "python": "3.11", "packages": 7}
    for text in (json.dumps({"other": 1}), "[" * 100_000, json.dumps(fields)):
        (folder / MARKER_FILE).write_text(text)
        assert environments.check("tiny").state == "unfinished"


def test_remove_touches_nothing_else(tiny, tmp_path):
    pretend_ready(tiny())
    others = [tmp_path / "home" / "envs" / n for n in ("tiny-other-0123456789ab", "tiny-short")]
    for other in others:
        other.mkdir()
    environments.remove("tiny")
    assert all(other.exists() for other in others)


def test_unknown_name():
    with pytest.raises(
        UsageError, match="no environment is called 'bfc'; there is: appworld, bfcl"
    ):
        environments.create("bfc")


def test_home_without_variables(monkeypatch, tmp_path):
    monkeypatch.delenv("KVBENCH_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert environments.home() == tmp_path / "kvbench"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert environments.home() == Path.home() / ".cache" / "kvbench"


def test_every_lock_pins_everything_exactly():
    assert PROFILES
    for profile in PROFILES.values():
        text = profile.lock.read_text()
        assert "://" not in text  # no index, no file
        pins = re.findall(r"^(?=[^# ])(.+?) \\\n((?:    .+\n)+)", text, re.MULTILINE)
        assert len(pins) == len(re.findall(r"^[^# ]", text, re.MULTILINE)) > 0
        for pin, hashes in pins:
            assert re.fullmatch(r"[\w.-]+==[\w.+]+( ; .+)?", pin), pin
            assert re.fullmatch(r"(    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+", hashes), pin
        compile(profile.probe, profile.name, "exec")
        assert profile.lock.parent == profiles.LOCKS
