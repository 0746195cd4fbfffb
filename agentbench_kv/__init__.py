"""kvbench: the truth about KV-cache methods on LLM agents."""

__version__ = "0.1.0"
