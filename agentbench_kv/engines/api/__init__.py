"""Any OpenAI-compatible endpoint: it takes messages and keeps its cache to itself."""

from agentbench_kv.engines.api.engine import ApiEngine

__all__ = ["ApiEngine"]
