"""The vLLM engine: `engine` drives a server, `backend` runs inside it.

The package itself imports nothing, because vLLM's interpreter imports it too.
"""
