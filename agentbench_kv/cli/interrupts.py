"""Ending in good order: Ctrl-C, SIGTERM, SIGHUP, and threads that would keep a process alive."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import click

from agentbench_kv.errors import KVBenchError

INTERRUPTED = 130
_ENDING = (
    "kvbench: interrupted: cancelling the trials under way, of which nothing is recorded; the same "
    "command goes on where this one stopped (interrupt again to end at once)\n"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANGING_S = 5.0
_SOON_S = 0.02


class _Interruption(KeyboardInterrupt):
    """An interruption that the user has been told of."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end what is inside in good order, and a second one at once.

    Signals that are ignored, as `nohup` does, stay so.
    """
    before, told = set(threading.enumerate()), False

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told and _in_finalizer(frame):
            _send_again(number)
            return
        if told:
            _tell("\x1b[?25h" if os.isatty(2) else "")  # a progress bar has hidden the cursor
            os._exit(INTERRUPTED)
        told = True
        _tell("\n" * os.isatty(2) + _ENDING)
        raise _Interruption

    theirs = {each: signal.getsignal(each) for each in _SIGNALS if _in_main_thread()}
    mine = [each for each, set_to in theirs.items() if set_to not in (signal.SIG_IGN, None)]
    for each in mine:
        signal.signal(each, interrupt)
    try:
        yield
    except BaseException as error:
        _end_if_hanging(before, error)
        if isinstance(error, _Interruption):
            sys.exit(INTERRUPTED)
        raise
    finally:
        for each in mine if not told else ():
            signal.signal(each, theirs[each])


def raise_interrupts() -> None:
    """Let Ctrl-C raise KeyboardInterrupt as ever, but never where Python would swallow it."""
    if _in_main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    if _in_finalizer(frame):
        _send_again(number)
    else:
        signal.default_int_handler(number, frame)


def _in_finalizer(frame: FrameType | None) -> bool:
    """Whether an object is being deleted: what is raised there is printed and forgotten."""
    while frame is not None:
        if frame.f_code.co_name == "__del__" or frame.f_code.co_filename == weakref.__file__:
            return True
        frame = frame.f_back
    return False


def _send_again(number: int) -> None:
    timer = threading.Timer(_SOON_S, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()


def end_at_once() -> None:
    """Let a further Ctrl-C end the process at once, also while the interpreter cleans up."""
    if _in_main_thread():
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _tell(text: str) -> None:
    """Write to standard error from a signal handler, which may have interrupted a write."""
    with suppress(OSError):
        os.write(2, text.encode())


def _end_if_hanging(before: set[threading.Thread], error: BaseException) -> None:
    """End the process for `error` if a thread started since hangs: the interpreter would wait."""
    new = [each for each in threading.enumerate() if each not in before and not each.daemon]
    latest = time.monotonic() + _HANGING_S
    for thread in new:
        thread.join(max(0.0, latest - time.monotonic()))
    if not any(thread.is_alive() for thread in new):
        return
    code = INTERRUPTED if isinstance(error, _Interruption) else 1
    if isinstance(error, KVBenchError):
        code = error.exit_code
        click.echo(f"kvbench: {' '.join(str(error).split())}", err=True)
    elif not isinstance(error, _Interruption):
        traceback.print_exception(error)
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)
