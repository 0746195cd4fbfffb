"""Phase labels of a token stream, in one place for the gateway and for every engine's backend."""

from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.labellers import TokenPhases
from agentbench_kv.phases.machine import PhaseMachine, PhaseTable

__all__ = ["PhaseMachine", "PhaseTable", "TokenCodec", "TokenPhases", "load_tokenizer"]
