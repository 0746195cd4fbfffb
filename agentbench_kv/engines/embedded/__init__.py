"""The embedded engine: a Hugging Face decoder in this process, the reference of all others."""

from agentbench_kv.engines.embedded.engine import EmbeddedEngine

__all__ = ["EmbeddedEngine"]
