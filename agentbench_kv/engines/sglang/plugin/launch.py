"""`python -m sglang.launch_server` after a look at the version and, on a CPU, the stand-ins.

SGLang's processes are spawned and import this module first, so what is at its top runs in all.
"""

from __future__ import annotations

import os
import sys

from agentbench_kv.engines.core.host import follow_parent
from agentbench_kv.engines.core.policy import VARIABLE
from agentbench_kv.engines.sglang.plugin import cpu
from agentbench_kv.engines.sglang.plugin.hooks import KEY, check_installed, check_version
from agentbench_kv.engines.sglang.plugin.versions import find_version

CPU = "SGLANG_USE_CPU_ENGINE"

if os.environ.get(CPU) == "1":
    cpu.install()


def main() -> None:
    """Check the version, load the plug-in, then do what SGLang's own launcher does."""
    follow_parent()
    check_version()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    words = sys.argv[1:]
    if VARIABLE in os.environ:
        version, _ = find_version()
        check_installed(version)  # SGLang only logs a plug-in it cannot load.
        words = version.arguments(words)
    try:
        run_server(prepare_server_args([*words, "--api-key", os.environ[KEY]]))
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main()
