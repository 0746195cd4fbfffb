"""What servers understand: one file per kind of endpoint."""

from agentbench_kv.loadgen.wires.base import Call, Wire
from agentbench_kv.loadgen.wires.completions import GatewayWire, VllmWire
from agentbench_kv.loadgen.wires.sglang import SglangWire

__all__ = ["WIRES", "Call", "Wire"]

WIRES: dict[str, type[Wire]] = {"gateway": GatewayWire, "vllm": VllmWire, "sglang": SglangWire}
