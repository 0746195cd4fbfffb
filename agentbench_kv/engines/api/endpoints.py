"""Which endpoint is asked, with which key."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from agentbench_kv.errors import PrerequisiteError, UsageError

OPENAI = "https://api.openai.com/v1"
# Keys come from the environment only.
BASE, KEY, OPENAI_KEY = "KVBENCH_API_BASE", "KVBENCH_API_KEY", "OPENAI_API_KEY"
_FORMS = (
    "expected openai/NAME, http(s)://HOST/v1#NAME or litellm/NAME, e.g. openai/gpt-4.1-mini "
    "or http://127.0.0.1:8000/v1#qwen3"
)
_SHORTEST_SECRET = 4


@dataclass(frozen=True)
class Endpoint:
    """Where requests go."""

    base: str  # URL without a slash at its end; empty where litellm knows it
    model: str  # as the endpoint knows it
    litellm: bool = False  # asked through that package, which reads its own variables
    key: str | None = field(default=None, repr=False)  # bearer token; never shown

    @property
    def public(self) -> bool:
        return self.base.startswith("https://api.openai.com/")

    @property
    def shown(self) -> str:
        """Name for messages and records."""
        return f"litellm/{self.model}" if self.litellm else self.base


def parse_model(model: str) -> Endpoint:
    """Read `--model`.

    `openai/NAME` asks OpenAI, or the server in `KVBENCH_API_BASE`, with `OPENAI_API_KEY` or
    `KVBENCH_API_KEY`. A URL with the model's name after `#` is asked with `KVBENCH_API_KEY` only,
    so that no other server is ever shown OpenAI's key.
    """
    scheme, _, name = model.partition("/")
    if model.startswith(("http://", "https://")):
        base, _, name = model.partition("#")
        endpoint = Endpoint(_checked(base), name, key=_key(KEY))
    elif scheme == "openai":
        base = _checked(os.environ.get(BASE) or OPENAI)
        endpoint = Endpoint(base, name, key=_key(OPENAI_KEY, KEY))
    elif scheme == "litellm":
        endpoint = Endpoint("", name, litellm=True)
    else:
        raise UsageError(f"model {model!r} of engine api: {_FORMS}")
    if not name.strip():
        raise UsageError(f"model {model!r} of engine api names no model: {_FORMS}")
    if endpoint.public and endpoint.key is None:
        raise PrerequisiteError(
            f"{endpoint.base} needs a key; set {OPENAI_KEY} in the environment, "
            f"or {BASE} to ask another server"
        )
    return endpoint


def redacted(text: str) -> str:
    """Return a text without any key that the environment holds."""
    for name, value in os.environ.items():
        if name.endswith("_API_KEY") and len(value) >= _SHORTEST_SECRET:
            text = text.replace(value, f"[{name}]")
    return text


def _key(*names: str) -> str | None:
    values = (os.environ.get(name, "").strip() for name in names)
    return next((value for value in values if value), None)


def _checked(base: str) -> str:
    """Refuse what is no URL, and URLs that would carry a secret into the records."""
    parts = urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"not an http(s) URL of an endpoint: {base!r}")
    if parts.username or parts.password or parts.query:
        raise UsageError(
            f"the URL of {parts.hostname} holds a user, a password or a query, which would be "
            f"recorded; put the key into {KEY}"
        )
    return base.rstrip("/")
