"""The command line: a file per verb or few verbs, loaded when it is used.

Verbs import what they need inside their functions: torch takes seconds, which `kvbench --help`
should not.
"""

from __future__ import annotations

import logging
import re
import sys
from importlib import import_module

import click

from agentbench_kv import __version__
from agentbench_kv.cli import interrupts, streams
from agentbench_kv.environments import process_env
from agentbench_kv.errors import KVBenchError

VERBS = (
    "ablate", "analyze", "baseline", "bench", "browser", "calibrate", "capture", "compare",
    "completion", "convert", "data", "demo", "doctor", "env", "export", "fidelity", "judge",
    "leaderboard", "ls", "report", "run", "select", "selftest", "serve", "show", "summarize",
    "sweep", "train",
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
    interrupts.raise_interrupts()
    try:
        _run()
    finally:
        interrupts.end_at_once()  # while the interpreter cleans up there is nothing left to save


def _run() -> None:
    try:
        streams.mend_streams()
        show_notes()
        process_env.apply()
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
        _fail("interrupted; the same command goes on where it stopped", interrupts.INTERRUPTED)
    except BrokenPipeError:  # whoever read the output has seen enough
        streams.silence(sys.stdout)
        sys.exit(1)
    except OSError as error:
        streams.silence(sys.stdout)
        _fail(streams.explained(error), KVBenchError.exit_code)
    except ValueError as error:
        if not _TOO_LONG.search(str(error)):
            raise
        _fail("a number has thousands of digits: expected one that means something", 2)
    except (MemoryError, RuntimeError) as error:
        if not (isinstance(error, MemoryError) or _NO_MEMORY.search(str(error))):
            raise
        _fail(f"not enough memory: {error or 'an allocation failed'}"[:300], KVBenchError.exit_code)


# Python has no type of error for a number that is too long to be read.
_TOO_LONG = re.compile("limit .* for integer string conversion")
# PyTorch has no type of error for memory of the host.
_NO_MEMORY = re.compile("can't allocate memory|out of memory|Storage size calculation overflowed")


def show_notes() -> None:
    """Print the package's own log lines, such as that kernels are being compiled, on stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("agentbench_kv")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


def _fail(message: str, code: int) -> None:
    click.echo(f"kvbench: {' '.join(message.split())}", err=True)
    sys.exit(code)
