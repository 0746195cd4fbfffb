"""Backends as processes: starting, failing, being watched, found by their imports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentbench_kv.engines.core.control import COMMAND_S, ControlServer
from agentbench_kv.engines.core.policy import VARIABLE, BackendPolicy
from agentbench_kv.engines.serving import process
from agentbench_kv.engines.serving.process import (
    BackendProcess,
    ControlClient,
    ControlError,
    Launch,
    cause_in,
    link_packages,
)
from agentbench_kv.environments import process_env
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.registry import make_method
from agentbench_kv.run.provenance import hardware


def launch(code: str, ready: Path | None = None) -> Launch:
    def answers() -> bool:
        return ready is not None and ready.exists()

    return Launch([sys.executable, "-c", code], answers, start_s=30.0)


def runs(pid: int) -> bool:
    """Whether a process runs; an orphan may be a zombie until init has noticed."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


def test_a_backend_that_does_not_start_shows_its_last_lines(tmp_path: Path) -> None:
    process = BackendProcess("toy", launch("raise SystemExit('no such model')"), tmp_path / "log")
    with pytest.raises(
        PrerequisiteError, match=r"did not start \(exit code 1\)[\s\S]*no such model"
    ):
        process.wait_ready()


VLLM = "(EngineCore pid=7) ERROR 11-22 10:00:00 [core.py:1] "
SGLANG = "[2026-11-22 10:00:00] "


@pytest.mark.parametrize(
    ("lines", "cause", "memory"),
    [
        (["WARNING: `OSError: x` may come", "IndexError: 3"], "IndexError: 3", False),
        (["(A pid=1) WARNING 11-22 1:1:1 [a.py:1] ValueError: no"], "", False),
        (["a.py:3: UserWarning: an error", "ValueError: yes"], "ValueError: yes", False),
        (
            [f"{VLLM}ValueError: root", f"{VLLM}RuntimeError: failed. See root cause above."],
            "ValueError: root",
            False,
        ),
        (["KeyError: 1", "During handling of it:", "TypeError: last"], "TypeError: last", False),
        (
            ["    raise ValueError(f'kvbench: {x}')", "ValueError: kvbench: MLA", "OSError: 1"],
            "MLA",
            False,
        ),
        (
            [f"{VLLM}torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB", "OSError: late"],
            "torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB",
            True,
        ),
        (["terminate: std::bad_alloc", "what()"], "terminate: std::bad_alloc", True),
        (
            ["pydantic.ValidationError: 1 error for Model", "  Value error, no heads", "end"],
            "pydantic.ValidationError: 1 error for Model Value error, no heads",
            False,
        ),
        (
            [
                f"{SGLANG}Can not initialize OpenAIServingResponses, error: Traceback (most recent",
                "ModuleNotFoundError: No module named 'openai_harmony'",
                f"{SGLANG}Subprocess scheduler_0 (pid=3) crashed with exit code -9.",
                f"{SGLANG}SIGQUIT received. It usually means one child failed.",
            ],
            "Subprocess scheduler_0 (pid=3) crashed with exit code -9.",
            False,
        ),
        (
            [
                f"{VLLM}RuntimeError: Error raised in subprocess:",
                f"{VLLM}ModuleNotFoundError: No module named 'torchvision'",
                "pydantic_core.ValidationError: 1 validation error for ModelConfig",
                "  Value error, ['X'] failed to be inspected. Please check the logs for details.",
            ],
            "ModuleNotFoundError: No module named 'torchvision'",
            False,
        ),
        (["loading", "no such model"], "no such model", False),
        ([], "", False),
        (["ValueError: " + "x" * 5000], "ValueError: " + "x" * 288 + "…", False),
    ],
)
def test_what_a_log_says_its_process_died_of(lines: list[str], cause: str, memory: bool) -> None:
    found = cause_in(lines)
    if not cause or "Subprocess" in cause or cause == "no such model":
        assert not found.certain
    assert (found.memory, found.text) == (memory, cause)


@given(st.lists(st.text(max_size=60) | st.sampled_from([VLLM, SGLANG, "Error: ", "  x"])))
def test_any_log_gives_one_line(lines: list[str]) -> None:
    assert len(cause_in(lines).text.splitlines()) <= 1


def test_a_backend_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    slow = Launch([sys.executable, "-c", "import time; time.sleep(60)"], lambda: False, start_s=0.3)
    process = BackendProcess("toy", slow, tmp_path / "log")
    with pytest.raises(PrerequisiteError, match="did not answer"):
        process.wait_ready()
    assert not process.alive


def test_stopping_ends_what_the_backend_started(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    code = (
        "import subprocess, sys, time, pathlib;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(ready)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    process = BackendProcess("toy", launch(code, ready), tmp_path / "log")
    process.wait_ready()
    while not ready.read_text():
        time.sleep(0.01)
    child = int(ready.read_text())
    process.stop()
    assert not process.alive
    for _ in range(1000):
        if not runs(child):
            break
        time.sleep(0.01)
    assert not runs(child)


def test_the_log_of_a_restart_is_its_own(tmp_path: Path) -> None:
    log = tmp_path / "log"
    for word in ("first", "second"):
        process = BackendProcess("toy", launch(f"print({word!r})"), log)
        with pytest.raises(PrerequisiteError):
            process.wait_ready()
    assert process.lines() == ["second"]
    assert log.read_text().split() == ["first", "second"]


def test_commands_are_answered_and_failures_told(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise ValueError("three sessions are open")

    server = ControlServer(tmp_path / "c", {"double": lambda r: 2 * r["n"], "fail": fail})
    client = ControlClient(tmp_path / "c")
    assert client.call("double", n=21) == 42
    with pytest.raises(ControlError, match="three sessions"):
        client.call("fail")
    with pytest.raises(ControlError, match="KeyError"):
        client.call("unknown")
    assert client.call("double", n=1) == 2
    assert not client.answers()
    client.close()
    server.close()
    assert not ControlClient(tmp_path / "absent").answers()


def test_a_command_may_wait_for_a_long_forward(tmp_path: Path) -> None:
    """A piece of a prompt took over a minute on a busy core, and what asked meanwhile failed."""
    server = ControlServer(tmp_path / "c", {"ping": lambda _: True})
    client = ControlClient(tmp_path / "c")
    assert client.answers()
    assert client._socket is not None
    patience = client._socket.gettimeout()
    assert patience is not None
    # The backend gives up first, and says so.
    assert patience > COMMAND_S >= 600
    client.close()
    server.close()


def test_a_backend_finds_our_package_and_its_entry_points(tmp_path: Path) -> None:
    folder = link_packages(
        tmp_path / "path", [], {"toy.plugins": {"ours": "agentbench_kv.errors:x"}}
    )
    code = (
        "import importlib.metadata as m, agentbench_kv.errors as e;"
        "print(e.__file__);"
        "print([p.value for p in m.entry_points(group='toy.plugins')])"
    )
    environment = {"PYTHONPATH": str(folder)}
    log = tmp_path / "log"
    process = BackendProcess(
        "toy", Launch([sys.executable, "-c", code], lambda: False, environment), log
    )
    with pytest.raises(PrerequisiteError):
        process.wait_ready()
    file, found = process.lines()
    assert file == str(folder / "agentbench_kv" / "errors.py")
    assert found == "['agentbench_kv.errors:x']"


def test_a_policy_survives_the_way_to_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = make_method("agentkv", "25%", {"interval": 16, "gqa": "max_prob"})
    policy = BackendPolicy(method, tmp_path, tmp_path / "c", tmp_path / "t")
    monkeypatch.setenv(VARIABLE, str(policy.save(tmp_path)))
    assert BackendPolicy.load() == policy


def test_a_backend_finds_the_kernels_built_before(tmp_path: Path) -> None:
    from agentbench_kv.kernels.build import SOURCES, toolchain

    folder = link_packages(tmp_path / "path", [], {})
    code = (
        "from agentbench_kv.kernels.build import SOURCES, toolchain;"
        "print(SOURCES); print(toolchain('cpu').key)"
    )
    log = tmp_path / "log"
    environment = {"PYTHONPATH": str(folder)}
    process = BackendProcess(
        "toy", Launch([sys.executable, "-c", code], lambda: False, environment), log
    )
    with pytest.raises(PrerequisiteError):
        process.wait_ready()
    sources, key = process.lines()
    assert Path(sources) != SOURCES
    assert key == toolchain("cpu").key


@pytest.mark.parametrize("early", [False, True])
def test_a_backend_ends_with_its_harness(tmp_path: Path, early: bool) -> None:
    """Also with one that was killed before the backend had begun to look."""
    ready, go = tmp_path / "ready", tmp_path / "go"
    backend = (
        "import os, pathlib, time\n"
        "from agentbench_kv.engines.core.host import follow_parent\n"
        f"ready, go = pathlib.Path({str(ready)!r}), pathlib.Path({str(go)!r})\n"
        f"if not {early}: follow_parent()\n"
        "ready.write_text(str(os.getpid()))\n"
        f"while {early} and not go.exists(): time.sleep(0.01)\n"
        f"if {early}: follow_parent()\n"
        "time.sleep(600)\n"
    )
    harness = (
        "import os, pathlib, sys, time\n"
        "from agentbench_kv.engines.serving.process import BackendProcess, Launch\n"
        f"ready = pathlib.Path({str(ready)!r})\n"
        f"path = {{'PYTHONPATH': {str(Path(process.__file__).parents[3])!r}}}\n"
        f"launch = Launch([sys.executable, '-c', {backend!r}], ready.exists, path)\n"
        f"toy = BackendProcess('toy', launch, pathlib.Path({str(tmp_path / 'log')!r}))\n"
        f"{early} or toy.wait_ready()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", harness], check=False, timeout=120)
    for _ in range(3000):
        if ready.exists() and ready.read_text():
            break
        time.sleep(0.01)
    go.touch()
    backend_pid = int(ready.read_text())
    for _ in range(3000):
        if not runs(backend_pid):
            break
        time.sleep(0.01)
    assert not runs(backend_pid)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_what_a_killed_server_started_ends_too(tmp_path: Path, method: str) -> None:
    """Also where no harness is left that would end it, and it has nothing else to do."""
    ready = tmp_path / "ready"
    script = tmp_path / "server.py"
    script.write_text(
        "import multiprocessing, os, pathlib, time\n"
        "from agentbench_kv.engines.core.host import follow_parent, follow_server\n"
        "def work():\n"
        f"    pathlib.Path({str(ready)!r}).write_text(str(os.getpid()))\n"
        "    time.sleep(600)\n"
        "if __name__ == '__main__':\n"
        "    follow_parent()\n"
        f"    core = multiprocessing.get_context({method!r}).Process(target=work)\n"
        "    core.start()\n"
        "    core.join()\n"
        "elif __name__ == '__mp_main__':\n"
        "    follow_server()\n"
    )
    server = subprocess.Popen(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(process.__file__).parents[3])},
        start_new_session=True,
    )
    for _ in range(6000):
        if ready.exists() and ready.read_text():
            break
        time.sleep(0.01)
    core = int(ready.read_text())
    assert runs(core)
    os.kill(server.pid, signal.SIGKILL)
    server.wait()
    for _ in range(3000):
        if not runs(core):
            break
        time.sleep(0.01)
    assert not runs(core)


@pytest.fixture
def nothing_set(monkeypatch) -> None:
    """An environment without the settings; what a test sets in it is undone."""
    monkeypatch.setattr(process_env, "_applied", set())
    for name in (*process_env._SETTINGS, "OMP_WAIT_POLICY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize("name", ["GOMP_SPINCOUNT", "THP_MEM_ALLOC_ENABLE"])
@pytest.mark.parametrize("theirs", [None, "0"])
def test_the_command_lines_own_settings_stay_with_it(monkeypatch, name, theirs):
    """What the user has set is left alone, and passed on to a backend."""
    if theirs:
        monkeypatch.setenv(name, theirs)
    process_env.apply()
    assert os.environ[name] == (theirs or process_env._SETTINGS[name])
    assert process._environment().get(name) == theirs


@pytest.mark.usefixtures("nothing_set")
def test_a_wait_policy_is_stronger_than_a_spin_count(monkeypatch):
    """OpenMP would take the count before the policy."""
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    process_env.apply()
    assert "GOMP_SPINCOUNT" not in os.environ


@pytest.mark.usefixtures("nothing_set")
def test_provenance_has_the_settings_in_force(monkeypatch):
    """Threads that spin, or pages that are not huge, change a speed."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    process_env.apply()
    assert hardware()["settings"] == {
        "GOMP_SPINCOUNT": "1000",
        "THP_MEM_ALLOC_ENABLE": "0",
        "OMP_WAIT_POLICY": "unset",
        "ATEN_CPU_CAPABILITY": "unset",
        "ONEDNN_MAX_CPU_ISA": "unset",
    }
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert hardware()["settings"]["ATEN_CPU_CAPABILITY"] == "default"


def test_provenance_has_the_processors_that_may_be_used(monkeypatch):
    """Under `taskset` a base had half of them, with as many threads as its rivals."""
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    assert (hardware()["cores"], hardware()["usable_cores"]) == (4, 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2}, raising=False)
    assert (hardware()["cores"], hardware()["usable_cores"]) == (4, 1)


@pytest.mark.usefixtures("nothing_set")
@pytest.mark.parametrize("applied", [True, False])
def test_a_server_of_our_own_has_them_whoever_starts_it(monkeypatch, applied):
    """The command line, which has them itself, or a program that uses the package."""
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    if applied:
        process_env.apply()
    assert process_env.settings() == {"GOMP_SPINCOUNT": "1000"}
    monkeypatch.setenv("OMP_WAIT_POLICY", "active")
    assert process_env.settings() == {}


def test_an_answer_that_breaks_off_is_a_hang_up(tmp_path: Path) -> None:
    """Half a line of JSON is no answer, and no error of the JSON."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listening:
        listening.bind(str(tmp_path / "c"))
        listening.listen()
        client = ControlClient(tmp_path / "c")
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(client.call, "stats")
            connection, _ = listening.accept()
            connection.recv(1000)
            connection.sendall(b'{"ok": 1')
            connection.close()
            with pytest.raises(ConnectionResetError, match="hung up"):
                asked.result()
        client.close()
