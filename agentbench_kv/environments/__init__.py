"""Managed environments: pinned dependencies that cannot share the core's interpreter."""

from agentbench_kv.environments.build import version_there
from agentbench_kv.environments.locations import home, override_variable
from agentbench_kv.environments.profiles import PROFILES, Profile
from agentbench_kv.environments.store import (
    EnvironmentStatus,
    check,
    create,
    list_environments,
    python_of,
    remove,
)

__all__ = [
    "PROFILES",
    "EnvironmentStatus",
    "Profile",
    "check",
    "create",
    "home",
    "list_environments",
    "override_variable",
    "python_of",
    "remove",
    "version_there",
]
