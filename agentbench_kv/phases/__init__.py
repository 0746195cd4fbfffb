"""Phase labels of a token stream, in one place for the gateway and for every engine's backend."""

from agentbench_kv.phases.machine import PhaseMachine, PhaseTable, TokenPhases
from agentbench_kv.phases.opening import system_tokens
from agentbench_kv.phases.tokens import TokenCodec, load_tokenizer

__all__ = [
    "PhaseMachine",
    "PhaseTable",
    "TokenCodec",
    "TokenPhases",
    "load_tokenizer",
    "system_tokens",
]
