"""What an environment needs that no index holds as a wheel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["BuiltWheel"]


@dataclass(frozen=True)
class BuiltWheel:
    """A distribution that is built from its source distribution.

    Attributes
    ----------
    distribution, version : str
    settings : mapping
        Environment variables of the build.
    tools : tuple of str
        Programs it needs.
    minutes : int
        About how long it takes on two cores, for the person who waits.
    """

    distribution: str
    version: str
    settings: Mapping[str, str] = field(default_factory=dict)
    tools: tuple[str, ...] = ()
    minutes: int = 1

    @property
    def requirement(self) -> str:
        """What pip is asked for."""
        return f"{self.distribution}=={self.version}"

    def pinned(self) -> bytes:
        """Return all that decides what is built, the processor aside."""
        return repr((self.requirement, sorted(self.settings.items()))).encode()
