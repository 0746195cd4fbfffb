"""The entry point that SGLang calls in each of its processes: it installs the hooks."""

from __future__ import annotations

from agentbench_kv.engines.serving.backend.policy import Policy
from agentbench_kv.engines.sglang.backend.hooks import TARGETS, mismatches
from agentbench_kv.engines.sglang.backend.patches import Patches
from agentbench_kv.engines.sglang.backend.versions import check_version


def register() -> None:
    """Install all hooks, or end the process: SGLang would only log what failed and go on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    problems = mismatches()
    if problems:
        raise SystemExit("kvbench: this SGLang is not the one expected: " + "; ".join(problems))
    patches = Patches(Policy.load())
    for target in TARGETS:
        HookRegistry.register(target, patches.hook(target), HookType.AROUND)
    HookRegistry.apply_hooks()
    check_installed()


def check_installed() -> None:
    """End the process unless every hook is in its place."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(TARGETS) - HookRegistry._patched)
    if missing:
        raise SystemExit(f"kvbench: hooks were not installed: {', '.join(missing)}")
