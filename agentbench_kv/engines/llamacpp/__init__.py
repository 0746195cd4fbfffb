"""The llama.cpp engine: GGUF models on a CPU, every method, and blocks that leave and come back.

`engine` is what the harness uses, `models` says which models it may use, `gguf` reads and writes
their files; `server` runs in the environment `llamacpp`.
"""
