"""What runs inside vLLM's processes: scheduler, worker, attention backend, plug-in, launcher.

Only this folder imports vLLM. Everything is registered through vLLM's own extension points:
`--scheduler-cls`, `--worker-cls`, the attention-backend registry and the `vllm.general_plugins`
entry point. Names and signatures used are listed in `contract`.
"""

from __future__ import annotations
