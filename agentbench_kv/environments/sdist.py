"""What an environment needs that no index holds as a wheel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BuiltWheel:
    """A distribution that is built from its source distribution."""

    distribution: str
    version: str
    settings: Mapping[str, str] = field(default_factory=dict)  # environment variables of the build
    tools: tuple[str, ...] = ()  # programs the build needs
    minutes: int = 1  # about how long it takes on two cores, for the person who waits

    @property
    def requirement(self) -> str:
        return f"{self.distribution}=={self.version}"

    def pinned(self) -> bytes:
        """Return all that decides what is built, the processor aside."""
        return repr((self.requirement, sorted(self.settings.items()))).encode()
