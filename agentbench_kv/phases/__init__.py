"""Phase labels of a token stream, in one place for the gateway and for every engine's backend."""

from agentbench_kv.phases.codec import TokenCodec, load_tokenizer
from agentbench_kv.phases.labellers import MARKERS, TokenPhases, make_labeller, recipe_of
from agentbench_kv.phases.machine import PhaseMachine, PhaseState, PhaseTable

__all__ = [
    "MARKERS",
    "PhaseMachine",
    "PhaseState",
    "PhaseTable",
    "TokenCodec",
    "TokenPhases",
    "load_tokenizer",
    "make_labeller",
    "recipe_of",
]
