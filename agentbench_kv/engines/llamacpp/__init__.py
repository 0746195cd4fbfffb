"""The llama.cpp engine: GGUF models on a CPU, every method, and blocks that leave and come back.

`engine` is what the harness uses, `models`, `metadata`, `tokenizer_folder` and `convert` are about
files, `shape` about what the engine refuses. `backend/` runs in the environment `llamacpp`.
"""
