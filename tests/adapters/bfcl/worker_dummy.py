"""Commands that misbehave in every way a worker can."""

import gc
import os
import signal
import socket
import subprocess
import time
from pathlib import Path


def setup(guard):
    if os.environ.get("DUMMY_BROKEN"):
        raise RuntimeError("this worker was told to break")
    if os.environ.get("DUMMY_SLOW"):
        time.sleep(30)
    if os.environ.get("DUMMY_GUARDED"):
        guard.install()
    return COMMANDS


def echo(request):
    return request.args


def environment(_):
    return dict(os.environ) | {"cwd": str(Path.cwd()), "pid": os.getpid()}


def wait(request):
    if request.cancelled.wait(request.args["seconds"]):
        raise InterruptedError("cancelled")
    return "waited"


def stubborn(request):
    time.sleep(request.args["seconds"])
    return "woke up"


def die(_):
    os._exit(7)


def freeze(_):
    os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(30)


def rubbish(request):
    port = next(each for each in gc.get_objects() if type(each).__name__ == "Port")
    port._stream.write(request.args["text"] + "\n")
    port._stream.flush()
    time.sleep(30)


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
        echo, environment, wait, stubborn, die, freeze, rubbish, shout, fail, big, hog, connect,
        spawn, shell, write,
    )
}  # fmt: skip
