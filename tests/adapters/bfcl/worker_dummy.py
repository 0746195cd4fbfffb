"""Commands that misbehave in every way a worker can."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

STATE = []


def setup(guard):
    if os.environ.get("DUMMY_BROKEN"):
        raise RuntimeError("this worker was told to break")
    if os.environ.get("DUMMY_SLOW"):
        time.sleep(30)
    if os.environ.get("DUMMY_GUARDED"):
        guard.install(Path.cwd())
    return COMMANDS


def echo(request):
    return request.args


def first_to_go(_):
    return [Path(f"/proc/{pid}/oom_score_adj").read_text() for pid in ("self", os.getppid())]


def environment(_):
    return dict(os.environ) | {"cwd": str(Path.cwd()), "pid": os.getppid()}


def wait(request):
    time.sleep(request.args["seconds"])
    return "waited"


def meet(request):
    """Wait until as many requests as asked for have come here."""
    place = Path(request.args["folder"])
    (place / str(os.getpid())).touch()
    while len(list(place.iterdir())) < request.args["count"]:
        time.sleep(0.01)
    return "met"


def die(_):
    os._exit(7)


def killed(request):
    os.kill(os.getpid(), request.args["signal"])


def worker(request):
    """Send a signal to the worker that this request was forked from."""
    os.kill(os.getppid(), request.args["signal"])
    time.sleep(60)


def hold(_):
    """Hold the interpreter for good: no other thread of the process runs any more."""
    return 7**10**10


def loop(_):
    while True:
        pass


def calls(request):
    """Use processor time in several calls, with an answer of the agent between two of them."""
    for _ in range(request.args["calls"]):
        end = time.process_time() + request.args["seconds"]
        while time.process_time() < end:
            pass
        request.renew()
    return "done"


def deep(_):
    made = []
    for _ in range(100_000):
        made = [made]
    return made


def grow(request):
    held = bytearray(request.args["size"])
    os.kill(os.getpid(), signal.SIGKILL)
    return len(held)


def files(_):
    return len([Path(os.devnull).open() for _ in range(5000)])


def fill(_):
    with Path("big").open("wb") as file:
        for _ in range(1 << 10):
            file.write(bytes(1 << 20))


def read(request):
    return len(Path(request.args["path"]).read_bytes())


def listing(request):
    return [str(each) for each in Path(request.args["path"]).iterdir()]


def remember(_):
    STATE.append(1)
    return len(STATE)


def shout(_):
    print("this is not protocol")  # noqa: T201
    os.write(1, b"nor is this\n")
    return "fine"


def fail(_):
    raise ValueError("no such thing")


def big(request):
    return "x" * request.args["size"]


def hog(_):
    return len(bytearray(8 << 30))


def connect(request):
    if request.args.get("allow"):
        request.guard.allow(request.args["host"], request.args["port"])
    with socket.create_connection((request.args["host"], request.args["port"]), timeout=5):
        return "connected"


def spawn(_):
    subprocess.run(["true"], check=True)


def shell(_):
    os.system("true")


def write(_):
    Path("left-behind.txt").write_text("x")


COMMANDS = {
    f.__name__: f
    for f in (
        echo, environment, first_to_go, wait, meet, die, killed, worker, hold, loop, calls, deep,
        grow, files, fill, read, listing, remember, shout, fail, big, hog, connect, spawn,
        shell, write,
    )
}  # fmt: skip
