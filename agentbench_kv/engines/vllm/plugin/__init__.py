"""What runs inside vLLM's processes. Only this folder imports vLLM.

Everything is registered through vLLM's own extension points: `--scheduler-cls`, `--worker-cls`, the
attention-backend registry and the `vllm.general_plugins` entry point (`launch.register`).
"""
