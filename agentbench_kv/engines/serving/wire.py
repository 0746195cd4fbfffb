"""What differs between serving engines: how one is started and spoken to over HTTP.

With what a model folder says of the model, and the server-sent events of an answer.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import httpx

from agentbench_kv.accounting import LayerReach
from agentbench_kv.engines.base import EngineOptions, Sampling
from agentbench_kv.engines.core.grammar import holds_grammars
from agentbench_kv.engines.core.host import ALLOW_UNTESTED
from agentbench_kv.engines.core.kv_dtype import BLOCK, BLOCKS, KV_DTYPES
from agentbench_kv.engines.core.ledger import WindowBytes
from agentbench_kv.engines.core.policy import VARIABLE, BackendPolicy
from agentbench_kv.engines.embedded.model import MOVING_ROPE, end_ids, free_memory, read_document
from agentbench_kv.engines.serving.process import (
    ControlClient,
    Launch,
    link_packages,
    listens,
)
from agentbench_kv.environments import version_there
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.methods.base import Method
from agentbench_kv.phases.machine import PromptPhases
from agentbench_kv.phases.tokens import StopMatcher, quiet_library

# llguidance before it fails in a server's own loop where a grammar leads nowhere.
GRAMMARS_SINCE = (1, 7)
# Model types whose keys were found to turn by `core.policy.rope_frequencies`.
TURNABLE = ("llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class ModelFacts:
    """Shapes and limits of a decoder, and what is special about its attention."""

    family: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context_limit: int  # last position + 1
    eos_token_ids: tuple[int, ...]
    rope_type: str = "default"
    rope_share: float = 1.0  # of a head's channels that RoPE turns
    rope_original: int = 0  # context before RoPE was scaled, if the config says
    # How many tokens each layer looks back on, 0 for all; empty if all layers look back on all.
    windows: tuple[int, ...] = ()
    extras: tuple[str, ...] = ()  # what attention does besides, in words: sinks, soft caps
    # Why eviction row by row would be wrong or has no rows to evict, in words.
    unevictable: str = ""
    nested: bool = False  # a multimodal model's decoder
    vocabulary: int | None = None  # ids that the model knows, from 0; None if it does not say
    stored_bytes: int = 0  # of the weights
    stored_dtype: str = ""

    @property
    def window(self) -> int:
        """The largest window of any layer; 0 without windows."""
        return max(self.windows, default=0)

    @property
    def full_layers(self) -> int:
        """Layers that look back on everything, in which a method can evict."""
        return self.layers - sum(window > 0 for window in self.windows)

    def groups_of(self, layers: int) -> int:
        """Return how many KV cache groups vLLM makes of so many layers of one kind.

        All groups have as many layers as the kind of which there are fewer, or about as many.
        """
        fewer, more = sorted((self.full_layers, self.layers - self.full_layers))
        return -(-layers // (more if more < 1.5 * fewer or not fewer else fewer))

    @property
    def groups(self) -> int:
        return self.groups_of(self.full_layers) + self.groups_of(self.layers - self.full_layers)

    def unturnable(self) -> str:
        """Say why keys cannot be turned to other positions; empty if they can."""
        if self.rope_share != 1:
            return f"{self.family} here turns {self.rope_share:.0%} of a head"
        if self.rope_type in MOVING_ROPE:
            return f"RoPE {self.rope_type!r} has frequencies that change with the length"
        if self.window:
            return f"{self.family} here has windows, whose keys would have to turn along"
        return "" if self.family in TURNABLE else f"{self.family} has not been checked"

    def bytes_per_token(self, dtype: str) -> int:
        """Keys and values of a token in the layers that look back on everything."""
        return self.full_layers * self._layer_bytes(dtype)

    def window_bytes(self, dtype: str) -> WindowBytes | None:
        """Return what a session reads besides, in layers with a window; None without any."""
        layers = self.layers - self.full_layers
        return WindowBytes(layers * self._layer_bytes(dtype), self.window) if layers else None

    def held_bytes(self, kv_dtype: str, dtype: str) -> Callable[[int], int] | None:
        """Return what gives the bytes of so many rows where not all take the same."""
        form = KV_DTYPES.get(kv_dtype)
        if form is None or not form.residual:
            return None
        return form.held(self.full_layers * self.kv_heads, self.head_dim, _BYTES[dtype])

    def pool_bytes(self, dtype: str) -> int:
        """Bytes of a token's place in a pool for all layers."""
        return self.layers * self._layer_bytes(dtype)

    def weight_bytes(self, dtype: str) -> int:
        """About what the weights take once they are loaded."""
        return self.stored_bytes * max(1, _BYTES[dtype] // _BYTES.get(self.stored_dtype, 4))

    def _layer_bytes(self, dtype: str) -> int:
        """Return bytes of a token in a layer; `dtype` may be a precision of cached rows."""
        if dtype in _BYTES:
            return 2 * self.kv_heads * self.head_dim * _BYTES[dtype]
        if dtype in BLOCKS:
            return 2 * self.kv_heads * self.head_dim // BLOCK * BLOCKS[dtype]
        return KV_DTYPES[dtype.partition("_")[0]].row_bytes(self.kv_heads, self.head_dim)


def read_model(path: Path) -> ModelFacts:
    """Read a model folder's config; PrerequisiteError if it lacks what a decoder's config has."""
    whole = read_document(path / "config.json")
    try:
        config, nested = decoder_config(path), isinstance(whole.get("text_config"), dict)
        heads = int(config["num_attention_heads"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
        return ModelFacts(
            *(str(config["model_type"]), int(config["num_hidden_layers"]), heads, kv_heads),
            *(head_dim, int(config["max_position_embeddings"]), _eos_ids(path, config)),
            *_rope(config),
            windows=_windows(config),
            extras=_extras(config),
            unevictable=_unevictable(config, whole),
            nested=nested,
            vocabulary=None if (size := config.get("vocab_size")) is None else int(size),
            stored_bytes=sum(file.stat().st_size for file in path.glob("*.safetensors")),
            stored_dtype=str(whole.get("dtype") or whole.get("torch_dtype") or ""),
        )
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise PrerequisiteError(
            f"{path / 'config.json'} is not a decoder's ({error}); give a Hugging Face model folder"
        ) from None


def decoder_config(path: Path) -> dict[str, Any]:
    """Return a decoder's configuration, with what its family has where the file says nothing.

    A multimodal model's is in `text_config`. What transformers does not know counts as written.
    """
    from transformers import AutoConfig

    whole = read_document(path / "config.json")
    text = whole.get("text_config")
    written: dict[str, Any] = text if isinstance(text, dict) else whole
    try:
        with quiet_library():
            found = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
            known: dict[str, Any] = getattr(found, "text_config", found).to_dict()
    except Exception:  # noqa: BLE001  a family or a value that transformers refuses, in any way
        return {"model_type": whole.get("model_type"), **written}
    return written | known


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    """Return each layer's window; without `layer_types` a window is of all layers."""
    window = int(config.get("sliding_window") or 0)
    if not window or config.get("use_sliding_window") is False:
        return ()
    layers = int(config["num_hidden_layers"])
    kinds = config.get("layer_types") or [_SLIDING] * layers
    found = tuple(window if kind == _SLIDING else 0 for kind in kinds)
    return found if any(found) else ()


def _extras(config: Mapping[str, Any]) -> tuple[str, ...]:
    there = {
        "attention sinks": config.get("model_type") == "gpt_oss",
        "capped attention logits": bool(config.get("attn_logit_softcapping")),
    }
    return tuple(name for name, has in there.items() if has)


# Keys that configurations of models with recurrent layers have, where `layer_types` is missing.
_RECURRENT = ("layers_block_type", "block_types", "hybrid_override_pattern", "mamba_d_state")
_ALIBI = ("bloom", "mpt", "baichuan")


def _unevictable(config: Mapping[str, Any], whole: Mapping[str, Any]) -> str:
    kinds = set(config.get("layer_types") or ()) - {_FULL, _SLIDING}
    chunks = [
        key for key in ("attention_chunk_size", "dual_chunk_attention_config") if config.get(key)
    ]
    recurrent = bool(kinds - {"chunked_attention"}) or any(config.get(key) for key in _RECURRENT)
    alibi = config.get("alibi") or config.get("model_type") in _ALIBI
    reasons = {
        "latent attention (MLA), which caches no keys and values of heads": bool(
            config.get("kv_lora_rank")
        ),
        f"layers that cache a state instead of rows ({', '.join(sorted(kinds))})": recurrent,
        f"attention in chunks ({', '.join(chunks)})": bool(chunks or kinds),
        "attention by distance (ALiBi), which rows that moved would change": bool(alibi),
        "layers that share another one's cache": bool(config.get("num_kv_shared_layers")),
        "an encoder or cross attention": bool(
            whole.get("is_encoder_decoder") or config.get("cross_attention_layers")
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _rope(config: Mapping[str, Any]) -> tuple[str, float, int]:
    """Return the kind of RoPE, the share of a head that it turns, and its original context."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise TypeError("its RoPE is no JSON object")
    # Gemma 3 has one for each kind of layer.
    rope = rope.get(_FULL) or rope
    kind = rope.get("rope_type") or rope.get("type") or "default"
    given = [each.get("partial_rotary_factor") for each in (rope, config)]
    share = next((float(share) for share in given if share is not None), 1.0)
    key = "original_max_position_embeddings"
    return str(kind), share, int(rope.get(key) or config.get(key) or 0)


def _eos_ids(path: Path, config: dict[str, Any]) -> tuple[int, ...]:
    generation = path / "generation_config.json"
    found = read_document(generation).get("eos_token_id") if generation.exists() else None
    return end_ids(config.get("eos_token_id") if found is None else found, path / "config.json")


@dataclass(frozen=True)
class CpuRoom:
    """What a server on a CPU has for its cache."""

    tokens: int  # that it gets: all sessions' whole contexts, if they fit into `most`
    most: int  # half of the memory that is free beside the weights
    bytes_per_token: int

    def said(self) -> str:
        """Say it for a run's record."""
        return f"{self.tokens} tokens, {self.tokens * self.bytes_per_token / 2**30:.2f} GiB"


def room_on_cpu(facts: ModelFacts, options: EngineOptions, context: int) -> CpuRoom:
    """Size the cache of a server on a CPU for as many sessions of `context` as run at once."""
    size = facts.pool_bytes(options.dtype)
    weights = 0 if options.load_format == "dummy" else facts.weight_bytes(options.dtype)
    most = max(0, free_memory() - weights) // 2 // size
    return CpuRoom(min(context * options.concurrency, most), most, size)


LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=32)


class UnixTransport(httpx.HTTPTransport):
    """HTTP over a Unix socket; one that could not connect is closed, which httpcore does not do."""

    def __init__(self, path: Path) -> None:
        super().__init__(uds=str(path), limits=LIMITS)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return super().handle_request(request)
        except httpx.ConnectError as error:
            _close_sockets(error)
            raise


def _close_sockets(error: BaseException) -> None:
    """Close the sockets in the frames of what failed first: nothing else knows them any more."""
    while error.__cause__ is not None:
        error = error.__cause__
    for frame, _ in traceback.walk_tb(error.__traceback__):
        for value in frame.f_locals.values():
            if isinstance(value, socket.socket):
                value.close()


@dataclass(frozen=True)
class GenerationRequest:
    """One generation."""

    session: str  # the backend's name of the session
    prompt: PromptPhases  # of all `tokens`
    tokens: Sequence[int]  # all tokens of the session
    known: int  # how many of them the backend was given, or gave, before
    sampling: Sampling
    max_tokens: int  # what is left of `sampling.max_tokens`, which a restart may have interrupted
    # A wire that can end a generation before its next token says here how.
    on_cancel: Callable[[Callable[[], None]], None]
    given: Sequence[int] = ()  # tokens to be taken as drawn
    best: list[int] | None = None  # where the wire puts the model's own best in each one's place
    # The wire puts `cached_tokens` here, where a stock engine says how many it had cached.
    usage: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class EngineWire(ABC):
    """How a server is started and spoken to over HTTP, locked with a key of its own."""

    full_as_shipped: ClassVar[bool] = True  # whether `full` runs without a plug-in

    options: EngineOptions
    facts: ModelFacts
    python: Path  # the environment's interpreter
    model: Path
    folder: Path  # private, for sockets and files
    gpu: bool
    stock: bool  # as shipped, without our plug-in: nobody answers on the control channel

    def __post_init__(self) -> None:
        self._key = secrets.token_hex(16)
        key = {"Authorization": f"Bearer {self._key}"}
        self._client = httpx.Client(
            headers=key, limits=LIMITS, timeout=10.0, transport=self._transport()
        )

    def _transport(self) -> httpx.BaseTransport | None:
        """Return how the server is reached, if not by a port."""
        return None

    @property
    def control(self) -> Path:
        return self.folder / "control"

    @property
    def context_limit(self) -> int:
        """Last position + 1."""
        return self.facts.context_limit

    @cached_property
    def holds_grammars(self) -> bool:
        """Whether its environment, and the model's tokenizer, have what grammars need."""
        found = re.match(r"(\d+)\.(\d+)", version_there(self.python, "llguidance"))
        if found is None or (int(found[1]), int(found[2])) < GRAMMARS_SINCE:
            return False
        return holds_grammars(self.model / "tokenizer.json", self.facts.eos_token_ids)

    @abstractmethod
    def launch(self) -> Launch:
        """Return how to start the backend."""

    @abstractmethod
    def stream(self, request: GenerationRequest) -> Generator[int]:
        """Yield a generation's ids; closing the iterator ends it in the backend.

        Raises OSError or httpx.TransportError if the connection breaks, RequestError if the backend
        says that it failed.
        """

    def stream_given(self, request: GenerationRequest) -> Generator[int]:
        """Have a server as shipped read given tokens as a prompt, and yield them.

        Where the model's own best are wanted, every token is asked for anew, behind those before
        it: its prefix cache has them.
        """
        given = list(request.given)
        places = range(len(given)) if request.best is not None else [len(given) - 1]
        for place in places:
            ask = replace(
                request,
                tokens=[*request.tokens, *given[:place]],
                given=(),
                best=None,
                max_tokens=1,
                usage=request.usage if place == places[0] else {},
            )
            with closing(self.stream(ask)) as stream:
                drawn = next(stream, None)
            if drawn is None:
                raise RequestError("the backend drew no token")
            if request.best is not None:
                request.best.append(drawn)
                yield given[place]
        if request.best is None:
            yield from given

    def lost(self) -> bool:
        """Return whether a backend that was ready says, or shows, that it will not answer again.

        Its front end may outlive what computes. One that is only busy is not lost.
        """
        return not self.stock and not listens(self.control)

    def use(self, method: Method) -> None:
        self.options = replace(self.options, method=method)

    def _up(self, path: str) -> bool:
        try:
            return self._client.get(path).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def _down(self, path: str) -> bool:
        """Return whether nobody takes a request, or the answer is that the server failed."""
        try:
            return self._client.get(path).status_code >= httpx.codes.INTERNAL_SERVER_ERROR
        except httpx.ConnectError:
            return True
        except httpx.TransportError:
            return False

    def _answers(self) -> bool:
        """Return whether our plug-in answers."""
        with closing(ControlClient(self.control, _ANSWER_S)) as control:
            return control.answers()

    def opened(self, session: str) -> None:  # noqa: ARG002
        """Prepare for a session that is new to the backend."""
        return None

    def details(self) -> dict[str, str]:
        """Return what a run's record says of the backend: version, set-up, flags."""
        set_up = {"setup": "as shipped" if self.stock else "plug-in"}
        facts = self.facts
        windowed = facts.layers - facts.full_layers
        return set_up | LayerReach(facts.full_layers, windowed, facts.window).document()

    def stock_tokens(self) -> int | None:
        """Return the cached tokens whose places a server as shipped says are taken; None if not."""
        return None

    def close(self) -> None:
        self._client.close()

    def _environment(self, group: str, plugins: Mapping[str, str]) -> dict[str, str]:
        """Return what any server needs: our package with its entry points, and the policy."""
        options, folder = self.options, self.folder
        groups = {group: plugins} if plugins else {}
        links = link_packages(folder / "path", [type(options.method).__module__], groups)
        environment = {"PYTHONPATH": str(links), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        if not self.stock:
            policy = BackendPolicy(options.method, self.model, self.control, options.trace)
            environment[VARIABLE] = str(policy.save(folder))
        if options.allow_untested:
            environment[ALLOW_UNTESTED] = "1"
        return environment


def asked_context(options: EngineOptions, argument: str) -> int | None:
    """Read the context that an engine's own argument asks for; UsageError if it is no number."""
    text = options.engine_args.get(argument)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and int(text)):
        raise UsageError(f"--engine-arg {argument}={text}: expected a number of tokens above 0")
    return int(text)


def as_flags(arguments: Mapping[str, str | None]) -> list[str]:
    """Return options as words of a command line; without a value they are switches."""
    words = []
    for name, value in arguments.items():
        words += [f"--{name}", value] if value else [f"--{name}"]
    return words


def stop_document(sampling: Sampling) -> dict[str, Any] | None:
    """Return the stop texts for the backend to match, so that nothing behind them is cached."""
    stop = sampling.stop
    return stop.document() if isinstance(stop, StopMatcher) else None


_ANSWER_S = 60.0  # from a plug-in in a server that is starting
# A queue of prefills may come before the first token.
_TIMEOUT = httpx.Timeout(30.0, read=3600.0)


class RequestError(KVBenchError):
    """The backend refused a request, or failed with it; the message is its own."""

    def __init__(self, message: str, *, refused: bool = False) -> None:
        super().__init__(message)
        self.refused = refused  # it read the request and did not want it


def post_events(client: httpx.Client, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Post a request and yield its events up to `[DONE]`; closing it hangs up.

    RequestError if the backend refuses or fails, httpx.TransportError if the stream breaks off.
    """
    with client.stream("POST", path, json=body, timeout=_TIMEOUT) as response:
        if response.status_code != httpx.codes.OK:
            said = f"{response.status_code}: {response.read().decode(errors='replace')[:500]}"
            refused = response.status_code < httpx.codes.INTERNAL_SERVER_ERROR
            raise RequestError(f"the backend answered {said}", refused=refused)
        for line in _lines(response.iter_bytes()):
            if not line.startswith(b"data:"):
                continue
            data = line.removeprefix(b"data:").strip()
            if data == b"[DONE]":
                return
            event = _event(data)
            if "error" in event:
                raise RequestError(f"the backend failed: {event['error']}")
            yield event
    # Or a server that dies in good order would end answers early.
    raise httpx.RemoteProtocolError("the answer broke off")


def _event(data: bytes) -> dict[str, Any]:
    try:
        event: dict[str, Any] = json.loads(data)
    except ValueError:
        raise httpx.RemoteProtocolError("the answer broke off within an event") from None
    return event


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Split at newlines only: generated text may hold what Unicode calls a line's end."""
    rest = b""
    for chunk in chunks:
        *whole, rest = (rest + chunk).split(b"\n")
        yield from whole
    if rest:
        yield rest
