"""The command line: a file per verb or few verbs, loaded when it is used.

Verbs import what they need inside their functions: torch takes seconds, which `kvbench --help`
should not.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from io import TextIOWrapper
from types import FrameType
from typing import Any, TextIO

import click

from agentbench_kv import __version__
from agentbench_kv.environments import process_env
from agentbench_kv.errors import KVBenchError

VERBS = (
    "ablate", "analyze", "baseline", "bench", "browser", "calibrate", "capture", "compare",
    "completion", "convert", "data", "demo", "doctor", "env", "export", "judge", "leaderboard",
    "ls", "report", "run", "select", "selftest", "serve", "show", "summarize",
)  # fmt: skip
# Verbs that share a file with a closely related one.
_FILES = {
    "baseline": "compare", "browser": "judge", "calibrate": "capture", "completion": "options",
    "data": "env", "export": "show", "select": "capture", "summarize": "show",
}  # fmt: skip


class LazyGroup(click.Group):
    """Loads a verb's module only when the verb is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        file = _FILES.get(cmd_name, cmd_name)
        command = getattr(import_module(f"agentbench_kv.cli.{file}"), cmd_name)
        return command if isinstance(command, click.Command) else None


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="kvbench")
def kvbench() -> None:
    """Measure KV-cache methods on LLM agents, with the proof that the budget was applied.

    Exit codes: 0 done, 1 failed, 2 the request or the set-up is wrong, 130 interrupted; compare: 3
    regression, 4 inconclusive.
    """


def main() -> None:
    """Run the command line; user errors become one line and exit code 2."""
    _mend_streams()
    _show_notes()
    process_env.apply()
    try:
        try:
            code = kvbench.main(standalone_mode=False) or 0
        except SystemExit as ended:
            code = ended.code
        sys.stdout.flush()  # or what cannot be written would only be noticed at the very end
        sys.exit(code)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except KVBenchError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; the same command goes on where it stopped", 130)
    except BrokenPipeError:  # whoever read the output has seen enough
        _silence(sys.stdout)
        sys.exit(1)
    except OSError as error:
        _silence(sys.stdout)
        _fail(_explained(error), KVBenchError.exit_code)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        _fail(f"not enough memory: {error or 'an allocation failed'}"[:300], KVBenchError.exit_code)


# PyTorch has no type of error for memory of the host.
_NO_MEMORY = re.compile("can't allocate memory|out of memory|Storage size calculation overflowed")


class _Notes:
    """Standard error, on which nothing depends: where nobody reads it any more, notes are lost."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            _silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except (OSError, ValueError):
            _silence(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _mend_streams() -> None:
    """Make streams that are closed, of another encoding or left by their reader do no harm."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would get its number and its output
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
        if getattr(sys, name) is None:
            mode = "w" if number else "r"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if not isinstance(sys.stderr, _Notes):
        sys.stderr = _Notes(sys.stderr)


def _silence(stream: TextIO) -> None:
    """Send what a stream cannot write nowhere, or it would fail again at the interpreter's end."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, stream.fileno())
            os.close(null)


def _explained(error: OSError) -> str:
    """Say what the system refused, and of which file."""
    reason = error.strerror or str(error) or type(error).__name__
    if error.filename is not None:
        return f"{os.fsdecode(error.filename)[:200]}: {reason}"
    full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
    return f"cannot write the output: {reason}" if full else reason


INTERRUPTED = 130
_ENDING = (
    "kvbench: interrupted: cancelling the trials under way, of which nothing is kept; the same "
    "command goes on where this one stopped (interrupt again to end at once)\n"
)
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_HANGING_S = 5.0


class _Interruption(KeyboardInterrupt):
    """An interruption that the user has been told of."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let Ctrl-C, SIGTERM and SIGHUP end what is inside in good order, and a second one at once.

    Signals that are ignored, as `nohup` does, stay so.
    """
    before, told = set(threading.enumerate()), False

    def interrupt(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        nonlocal told
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


def _show_notes() -> None:
    """Print the package's own log lines, such as that kernels are being compiled, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("agentbench_kv")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _fail(message: str, code: int) -> None:
    click.echo(f"kvbench: {' '.join(message.split())}", err=True)
    sys.exit(code)
