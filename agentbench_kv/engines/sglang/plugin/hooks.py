"""The hooks in SGLang: thin, one per target, named as it is without underscores.

Every hook is given the function it wraps, then that function's own arguments. The targets are
private, so a version is only supported if all of them are there as listed: the plug-in checks that
before it installs anything, and a contract test checks it again.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch

from agentbench_kv.engines.core.host import refuse_untested
from agentbench_kv.engines.core.policy import BackendPolicy
from agentbench_kv.engines.core.rings import as_methods_see
from agentbench_kv.engines.sglang.plugin.memory import Original, add_one_req, running_growth
from agentbench_kv.engines.sglang.plugin.runtime import Runtime
from agentbench_kv.engines.sglang.plugin.sessions import ACCOUNT, SglangSession, attach, wishes
from agentbench_kv.engines.sglang.plugin.versions import Sglang0512, find_version
from agentbench_kv.engines.sglang.plugin.worker import put_given


class Patches:
    """All hooks of a process."""

    def __init__(self, policy: BackendPolicy, version: Sglang0512) -> None:
        self._policy = policy
        self._version = version
        self._runtime: Runtime | None = None

    @property
    def runtime(self) -> Runtime:
        """What the scheduler's process has; there is none in the others."""
        if self._runtime is None:
            raise RuntimeError("kvbench: SGLang has no memory pool yet")
        return self._runtime

    def hook(self, target: str) -> Original:
        hook: Original = getattr(self, target.rpartition(".")[2].lstrip("_"))
        return hook

    def init_memory_pool(self, original: Original, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Take our memory before SGLang's cache takes what is left; CUDA graphs come later."""
        runtime = Runtime(self._policy, runner, self._version)
        original(runner, *args, **kwargs)
        runtime.connect(runner)
        self._runtime = runtime

    alloc_memory_pool = init_memory_pool

    def init_request_dispatcher(self, original: Original, scheduler: Any) -> None:
        original(scheduler)
        self.runtime.attach(scheduler)

    def process_input_requests(self, original: Original, scheduler: Any, requests: Any) -> None:
        original(scheduler, requests)
        self.runtime.serve()

    def init_req_max_new_tokens(self, _: Original, scheduler: Any, request: Any) -> None:
        """Bound an answer by the context alone: only live rows need room in the pool."""
        asked = request.sampling_params.max_new_tokens
        room = scheduler.max_req_len - len(request.origin_input_ids) - 1
        request.sampling_params.max_new_tokens = max(0, room if asked is None else min(asked, room))

    def add_request_to_queue(
        self, original: Original, scheduler: Any, request: Any, is_retracted: bool = False
    ) -> None:
        """Begin a turn with a request that enters the queue for the first time."""
        refused = request.to_finish is not None or request.finished()
        if not is_retracted:
            attach(request, None if refused else self.runtime.table.begin(request))
        original(scheduler, request, is_retracted)

    def abort_request(self, original: Original, scheduler: Any, order: Any) -> None:
        """End the turns of requests taken from the queue, which SGLang forgets to do."""
        before = list(scheduler.waiting_queue)
        original(scheduler, order)
        left = {id(request) for request in scheduler.waiting_queue}
        for request in before:
            session = self.runtime.table.of(request)
            if id(request) not in left and session is not None:
                self.runtime.memory.release_turn(session)

    def get_new_batch_prefill(self, original: Original, scheduler: Any, *running: Any) -> Any:
        """Make room for the first waiting request if nothing else will."""
        if scheduler.waiting_queue:
            self.runtime.memory.has_row()
        planned = original(scheduler, *running)
        batch, running_batch = self._version.running_of(scheduler, planned)
        if batch is None:
            self.runtime.memory.unblock(running_batch)
        return planned

    def update_running_batch(self, original: Original, scheduler: Any, batch: Any) -> Any:
        """Run the events that fall due before SGLang looks at what memory is left."""
        size = batch.batch_size()
        batch.filter_batch()
        if batch.batch_size() < size:
            batch.batch_is_full = False
        if not batch.is_empty():
            self.runtime.steps.prepare(batch)
            self.runtime.memory.make_room(batch)
        return original(scheduler, batch)

    def prepare_for_extend(self, original: Original, batch: Any) -> None:
        original(batch)
        self.runtime.steps.prefill(batch.reqs)

    def prepare_for_decode(self, original: Original, batch: Any) -> None:
        original(batch)
        self.runtime.steps.decode(batch.reqs)

    def release_req(
        self, original: Original, batch: Any, index: int, *args: Any, **kwargs: Any
    ) -> Any:
        """Free all rows of a request that is put back; SGLang would keep a session's."""
        request = batch.reqs[index]
        session = self.runtime.table.of(request)
        if session is None:
            return original(batch, index, *args, **kwargs)
        self.runtime.memory.retracted += 1
        resumable = True
        if session.lasting:
            self._version.free_rows_of(batch.tree_cache, request)
            request.reset_for_retract()
        else:
            resumable = original(batch, index, *args, **kwargs)
            self.runtime.steps.lose(session)
        self.runtime.steps.start_over(request, session)
        if request.to_finish is not None:
            self.runtime.memory.release_turn(session)
        return resumable

    def init_next_round_input(
        self, original: Original, request: Any, *args: Any, **kwargs: Any
    ) -> None:
        """Make lengths physical: the first ids only stand for rows that are gone."""
        session = self.runtime.table.of(request)
        if session is not None:
            self.runtime.prefixes.offer(session)
        original(request, *args, **kwargs)
        if session is not None and session.ledger.deficit:
            self._version.skip_ids(request, session.ledger.deficit)

    def check_token_based_finish(self, original: Original, request: Any, tokens: list[int]) -> bool:
        """End a generation where the harness wants it."""
        from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

        session = self.runtime.table.of(request)
        if session is None or session.stop is None:
            return bool(original(request, tokens))
        if not any(session.stop(token) for token in tokens):
            return False
        request.finished_reason = FINISH_MATCHED_TOKEN(matched=tokens[-1])
        request.finished_len = len(request.output_ids)
        return True

    def add_one_req(
        self, original: Original, adder: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Admit a request, unless it has no row or another one computes what it begins with."""
        from sglang.srt.managers.schedule_policy import AddReqResult

        table, prefixes = self.runtime.table, self.runtime.prefixes
        session, uncached = table.of(request), self._version.uncached(request)
        if session is not None and not prefixes.may_begin(session):
            return AddReqResult.CONTINUE
        promised = sum(not self._has_row(other) for other in adder.can_run_list)
        if not self._has_row(request) and not self.runtime.memory.has_row(promised):
            if session is not None:
                prefixes.withdraw(session)
            return AddReqResult.NO_TOKEN
        result = add_one_req(table, original, adder, request, uncached, *args, **kwargs)
        if session is not None and request not in adder.can_run_list[-1:]:
            prefixes.withdraw(session)
        return result

    def _has_row(self, request: Any) -> bool:
        return self._version.rows(request).req_pool_idx is not None

    def get_running_request_total_token_offset(
        self, original: Original, adder: Any, request: Any
    ) -> float:
        return running_growth(self.runtime.table, original, adder, request)

    def create_req(
        self,
        original: Original,
        history: Any,
        arrived: Any,
        tokenizer: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Append exactly the ids that came; SGLang would drop a leading BOS."""
        request = original(history, arrived, None, *args, **kwargs)
        request.tokenizer = tokenizer
        if request.to_finish is not None:
            # Or SGLang ends the turn that is running in the session it was refused from.
            request.session = None
            return request
        wanted = wishes(arrived.sampling_params)
        if not wanted:
            return request
        if wanted["repeated"]:
            del request.origin_input_ids[-wanted["repeated"] :]
            request.origin_input_ids_unpadded = request.origin_input_ids[:]
        if len(request.origin_input_ids) != wanted["total"]:
            found = len(request.origin_input_ids)
            request.set_finish_with_abort(
                f"session {history.session_id} would have {found} tokens, not {wanted['total']}"
            )
            history.abort_req()
            request.session = None
        return request

    def trim_overshoot(
        self, original: Original, streaming: Any, request: Any, finished_len: int
    ) -> None:
        session = self.runtime.table.of(request)
        if session is None:
            original(streaming, request, finished_len)
        else:
            self.runtime.steps.finish(streaming, request, session, finished_len)

    def release_session(self, original: Original, streaming: Any, name: str) -> None:
        """Forget what is known of rows about to be freed."""
        session = self.runtime.table.sessions.get(name)
        if session is not None:
            self._before_release(streaming, session)
        original(streaming, name)

    def close(self, original: Original, controller: Any, name: str) -> None:
        original(controller, name)
        session = self.runtime.table.sessions.get(name)
        if session is not None and name not in controller.sessions:
            self.runtime.table.forget(session)

    def cache_finished_req(
        self, original: Original, cache: Any, request: Any, *args: Any, **kwargs: Any
    ) -> None:
        session = self.runtime.table.of(request) if request.finished() else None
        if session is not None:
            self.runtime.steps.finish_alone(request, session)
        original(cache, request, *args, **kwargs)
        if session is not None:
            self.runtime.steps.lose(session)
            self.runtime.table.forget(session)

    def claim_kv_row(self, original: Original, cache: Any, request: Any) -> bool:
        """End a turn whose rows are about to go: one without a session, or one that is aborted."""
        from sglang.srt.managers.schedule_batch import FINISH_ABORT

        session = self.runtime.table.of(request) if request.finished() else None
        if session is not None and not session.lasting:
            self.runtime.steps.finish_alone(request, session)
            self.runtime.steps.lose(session)
            self.runtime.table.forget(session)
        elif session is not None and isinstance(request.finished_reason, FINISH_ABORT):
            self._before_release(self._version.sessions(cache), session)
        return bool(original(cache, request))

    def update_request_meta_info(
        self,
        original: Original,
        manager: Any,
        meta_info: dict[str, Any],
        state: Any,
        customized_info: dict[str, Any],
        index: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Say a turn's accounting as it is: 0.5.23 takes it for a list, an entry per token."""
        others = {name: all_ for name, all_ in customized_info.items() if name != ACCOUNT}
        original(manager, meta_info, state, others, index, *args, **kwargs)
        if ACCOUNT in customized_info:
            meta_info[ACCOUNT] = customized_info[ACCOUNT][index]

    def init_new(
        self, original: Original, cls: Any, batch: Any, runner: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Give a forward the logical positions of its tokens, and the tokens that it is to draw."""
        forward = original(cls, batch, runner, *args, **kwargs)
        forward.kvbench_given = self.runtime.steps.given(batch.reqs or ())
        worker = self.runtime.worker
        mode = forward.forward_mode
        if forward.positions is None or mode.is_idle() or worker.rows.cache_positions:
            return forward
        deficits = worker.deficits[forward.req_pool_indices]
        if not mode.is_decode():
            deficits = torch.repeat_interleave(
                deficits, forward.extend_seq_lens, output_size=int(forward.extend_num_tokens)
            )
        forward.positions = forward.positions + deficits.to(forward.positions.dtype)
        return forward

    def sample(self, original: Original, runner: Any, logits: Any, forward: Any) -> Any:
        """Draw as SGLang does, and put given tokens in the place of what was drawn."""
        drawn = original(runner, logits, forward)
        given = getattr(forward, "kvbench_given", ())
        return put_given(drawn, given) if given else drawn

    def forward(
        self,
        original: Original,
        backend: Any,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Keep the queries of an attention layer, which carry RoPE already."""
        worker = self.runtime.worker
        idle = forward_batch.forward_mode.is_idle()
        if idle or not worker.keeps_queries:
            return original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
        queries = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        queries = as_methods_see(queries, layer.scaling)
        worker.observe(layer.layer_id, queries, forward_batch)
        output = original(backend, q, k, v, layer, forward_batch, *args, **kwargs)
        if not forward_batch.forward_mode.is_decode():
            worker.add_sums(layer.layer_id, queries)
        return output

    def _before_release(self, streaming: Any, session: SglangSession) -> None:
        runtime, slot = self.runtime, streaming.slots.get(session.name)
        request, rows = session.request, self._version.rows
        if slot is not None and request is not None and rows(request).req_pool_idx is not None:
            # SGLang takes the longer of the two, but events have shortened the request's.
            rows(slot).kv_allocated_len = rows(request).kv_allocated_len
        runtime.forks.hand_over(session)
        runtime.steps.lose(session)
        if request is not None and request.finished():
            runtime.table.end_turn(session, session.tokens)


TESTED = ("0.5.12", "0.5.23")

# The server's key comes this way because everybody may read a command line.
KEY = "KVBENCH_SGLANG_KEY"


def check_version() -> None:
    """End the process unless SGLang is the tested version, or another one is allowed."""
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise SystemExit(
            "kvbench: SGLang is not installed here; make it with: kvbench env create sglang"
        ) from None
    refuse_untested("SGLang", version, TESTED)


def register() -> None:
    """Install all hooks, or end the process: SGLang would only log what failed and go on."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    check_version()
    version, problems = find_version()
    if problems:
        raise SystemExit("kvbench: this SGLang is not the one expected: " + "; ".join(problems))
    patches = Patches(BackendPolicy.load(), version)
    for target in version.targets:
        HookRegistry.register(target, patches.hook(target), HookType.AROUND)
    HookRegistry.apply_hooks()
    check_installed(version)


def check_installed(version: Sglang0512) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    missing = sorted(set(version.targets) - HookRegistry._patched)
    if missing:
        raise SystemExit(f"kvbench: hooks were not installed: {', '.join(missing)}")
