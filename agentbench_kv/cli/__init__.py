"""The command line: a file per verb or few verbs, loaded when it is used.

Verbs import what they need inside their functions: torch takes seconds, which `kvbench --help`
should not.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from types import FrameType

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
    _show_notes()
    process_env.apply()
    try:
        sys.exit(kvbench.main(standalone_mode=False) or 0)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        _fail(error.format_message(), error.exit_code)
    except KVBenchError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        _fail("interrupted; the same command goes on where it stopped", 130)


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
