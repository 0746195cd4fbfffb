"""The releases of tau2-bench that there are tasks for; their figures are never in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Release:
    """One release: what is installed, and the data that goes with it."""

    tag: str  # in its repository
    environment: str  # profile it is installed by (`kvbench env create`)
    installed: str  # version of the distribution `tau2`
    data: str  # folder, among the user's data sets
    # Domain -> file -> git's blob id at the tag: what `git hash-object FILE` prints.
    published: Mapping[str, Mapping[str, str]]


_V0: dict[str, dict[str, str]] = {
    "airline": {
        "tasks.json": "ca8b69141e816ad140a042f16b94fc646f0acdc9",
        "policy.md": "8098be7db3f47de943fad39d1e057ede6cc6cd04",
        "db.json": "c6a1e817aa9102c5822e83affb3595acbc312701",
    },
    "retail": {
        "tasks.json": "866c95e5e89186b185c2b10e06273099e143ec69",
        "policy.md": "d127e6b074654926f337d0d98b0e669ebe90d19e",
        "db.json": "4d67b03b2d39ade5a7ab6facb2edd7ab3e013d48",
    },
    "telecom": {
        "tasks.json": "87b904294c773f6f937777e375179d0343b4f541",
        "main_policy.md": "c55f5bd10c49a3d0b48f6e83a3168e6242fb2be7",
        "tech_support_manual.md": "b64a9f1433bfb62bdaf9e5c1d90c10e833b26c17",
        "db.toml": "6c8a639d85896a049a5daf87332107a840a55aac",
        "user_db.toml": "1def9a98eabf1d4a5fc95a67387ec294f56196d8",
    },
}
# Databases, policies and manuals are those of v0.2.0.
_V1: dict[str, dict[str, str]] = {
    "airline": {
        **_V0["airline"],
        "tasks.json": "ea4ff5e3f5e3d97ca391846a6e8dd9eb3437dc80",
        "split_tasks.json": "c83cce155671e66a6bf07450fd2845fe0eb1f229",
    },
    "retail": {
        **_V0["retail"],
        "tasks.json": "e95a9f898b2d1f6568ea8faec78edc3767ce747d",
        "split_tasks.json": "8b20704a17aa1940b1e58668f89dcef2ddaeeea3",
    },
    "telecom": {
        **_V0["telecom"],
        "tasks.json": "6f41a5e3489e187fa247d729706509d8250a31c1",
        "split_tasks.json": "a5b01687eaaa5c669f792bff33c0d6ec13be36fd",
    },
}

V0 = Release("v0.2.0", "tau2", "0.2.1.dev0", "tau2_v0.2.0", _V0)
V1 = Release("v1.0.1", "tau2-v1", "1.0.1", "tau2_v1.0.1", _V1)
