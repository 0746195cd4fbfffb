"""Memory: prerequisite conversations, their snapshots, and the questions."""

import hashlib
import sys
import threading
import types
from dataclasses import replace

import pytest

from agentbench_kv.adapters.base import Sample, TrialContext
from agentbench_kv.adapters.bfcl.memory import (
    Chain,
    MemoryAllBackends,
    MemoryKv,
    MemoryVector,
    seed_of,
    session_of,
)
from agentbench_kv.adapters.bfcl.worker import memory as memory_worker
from agentbench_kv.adapters.bfcl.worker.memory import HashEncoder, backend_of, contents
from agentbench_kv.adapters.worker import (
    RemoteError,
    TrialLimitError,
    WorkerDiedError,
    WorkerError,
    WorkerTimeoutError,
)
from agentbench_kv.errors import PrerequisiteError, UsageError

engine = pytest.mark.engine
CONTEXT = TrialContext(1, 5, None, "http://127.0.0.1:1", "run|1|1|q", timeout_s=30)


def told(number, status="scored", **more):
    return {"status": status, "text": "", "steps": [], "account": {}, **more} | (
        {"snapshot": {"memory": f"after {number}"}} if status != "context_limit" else {}
    )


class Talk:
    """Plays conversations and remembers how it was asked; `fails` maps a number to an error."""

    def __init__(self, fails=None, status="scored"):
        self.asked = []
        self.fails = dict(fails or {})
        self.status = status

    def __call__(self, conversation, context, snapshot):
        number = int(conversation)
        self.asked.append((number, snapshot, context))
        if number in self.fails:
            raise self.fails.pop(number)
        return told(number, self.status)


def chain(length=3):
    return Chain([str(number) for number in range(length)])


def test_a_chain_hands_each_snapshot_to_the_next_conversation():
    talk, played = Talk(), chain()
    records = played.play(CONTEXT, talk)
    assert [each["id"] for each in records] == ["0", "1", "2"]
    given = [snapshot for _, snapshot, _ in talk.asked]
    assert given == [None, {"memory": "after 0"}, {"memory": "after 1"}]
    assert played.snapshot == {"memory": "after 2"}
    assert [context.session for *_, context in talk.asked] == [
        f"run|1|1.memory{number}|q" for number in range(3)
    ]


def test_a_chain_is_played_once():
    talk, played = Talk(), chain()
    played.play(CONTEXT, talk)
    assert played.play(CONTEXT, talk) == []
    assert len(talk.asked) == 3


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (WorkerDiedError("gone"), "infra_error"),
        (WorkerTimeoutError("slow"), "timeout"),
        (RemoteError("ServerError", "HTTP 500"), "engine_error"),
    ],
)
def test_a_failed_conversation_fails_the_trial_and_the_next_goes_on_there(error, status):
    talk, played = Talk({1: error}), chain()
    with pytest.raises(WorkerError) as caught:
        played.play(CONTEXT, talk)
    assert caught.value.status == status
    assert str(caught.value).startswith("1: ")
    played.play(CONTEXT, talk)
    assert [number for number, *_ in talk.asked] == [0, 1, 1, 2]
    assert talk.asked[2][1] == {"memory": "after 0"}


def test_a_conversation_past_the_context_saves_nothing_and_is_counted():
    played = chain()
    played.play(CONTEXT, Talk(status="context_limit"))
    assert played.snapshot is None
    assert played.metrics(3)["prerequisites_incomplete"] == 3


class BombedPool:
    """Answers as a worker whose first conversation never comes back."""

    def call(self, command, args=None, **_):
        if command == "conversations":
            return [{"id": f"memory_kv_prereq_{n}-x", "scenario": "x"} for n in range(2)]
        if command == "close_session":
            return {"peak_live": 9}
        if args["sample"] == "memory_kv_prereq_0-x":
            raise TrialLimitError("it met a limit")
        told = {"status": "scored", "score": 1.0, "text": "", "steps": [], "verdict": {}}
        return {**told, "snapshot": {"memory": args["sample"]}}

    def close(self):
        pass


def test_a_conversation_that_meets_a_limit_twice_saves_nothing_and_the_next_goes_on():
    task = MemoryKv()
    task._started = BombedPool()
    question = Sample("memory_kv_0-x", "x")
    first, second = (task.run_trial(question, CONTEXT) for _ in range(2))
    assert (first.status, first.error) == ("infra_error", "memory_kv_prereq_0-x: it met a limit")
    assert (second.status, second.score) == ("scored", 1.0)
    assert second.metrics["prerequisites_incomplete"] == 1
    assert second.metrics["prerequisites_peak_live"] == 9
    assert [each["status"] for each in second.transcript["prerequisites"]] == ["timeout", "scored"]
    assert second.transcript["snapshot"] == {"memory": "memory_kv_prereq_1-x"}


def test_seeds_do_not_depend_on_who_plays():
    talks = [Talk(), Talk()]
    for talk, context in zip(talks, (CONTEXT, replace(CONTEXT, seed=99)), strict=True):
        chain().play(context, talk)
    first, second = ([context.seed for *_, context in talk.asked] for talk in talks)
    assert first == second == [seed_of(str(number), 1) for number in range(3)]
    assert seed_of("0", 1) != seed_of("0", 2)


def test_only_one_trial_plays_a_chain():
    talk, task, counts = Talk(), MemoryKv(), []
    together = threading.Barrier(8, timeout=30)
    question = Sample("memory_kv_0-student-0", "student")

    def conversations(_command):
        together.wait()
        ids = ["memory_kv_prereq_0-student-0", "memory_kv_prereq_1-student-1"]
        other = {"id": "memory_kv_prereq_2-finance-0", "scenario": "finance"}
        return [*({"id": each, "scenario": "student"} for each in ids), other]

    def trial():
        mine = task._chain(question, 0)
        counts.append(len(mine.play(CONTEXT, lambda name, *more: talk(name[17], *more))))

    task._call = conversations

    threads = [threading.Thread(target=trial) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(counts) == [0] * 7 + [2]


def test_a_busy_chain_costs_a_timeout():
    played = chain()
    played._lock.acquire()
    with pytest.raises(TimeoutError):
        played.play(replace(CONTEXT, timeout_s=0.01), Talk())


def test_the_sample_stays_the_last_part_of_a_session():
    assert session_of("r|0|1|memory_kv_0", 2) == "r|0|1.memory2|memory_kv_0"
    assert session_of("bare", 0).endswith("bare")


@pytest.mark.parametrize("backend", ["kv", "vector", "rec_sum"])
def test_backend_of_every_kind_of_name(backend):
    for name in ("", "_0-customer-0", "_prereq_22-student-0"):
        assert backend_of(f"memory_{backend}{name}") == backend


def test_contents_in_the_form_of_the_official_file():
    class Store:
        core_memory = {"a": "b"}  # noqa: RUF012
        archival_memory = {}  # noqa: RUF012

    class Vectors:
        core_memory = archival_memory = type("V", (), {"export": lambda _: {"next_id": 0}})()

    summary = type("Summary", (), {"memory": "text"})()
    assert contents(Store()) == {"core_memory": {"a": "b"}, "archival_memory": {}}
    assert contents(Vectors())["core_memory"] == {"next_id": 0}
    assert contents(summary) == {"memory": "text"}


@pytest.mark.parametrize("task", [MemoryVector, MemoryAllBackends])
def test_the_encoder_must_be_chosen(task):
    with pytest.raises(PrerequisiteError, match="--set encoder="):
        task().samples(1, 0)


def test_an_encoder_that_is_no_folder():
    with pytest.raises(PrerequisiteError, match="not a folder"):
        MemoryVector(encoder="/no/such/folder").samples(1, 0)


def test_an_encoder_folder_is_loaded_instead_of_the_hub_model(monkeypatch):
    class Encoder:
        def __init__(self, name, device):
            self.made = (name, device)

    module = types.ModuleType("sentence_transformers")
    module.SentenceTransformer = Encoder
    monkeypatch.setitem(sys.modules, "sentence_transformers", module)
    memory_worker._choose_encoder("/models/mini")
    assert module.SentenceTransformer("all-MiniLM-L6-v2").made == ("/models/mini", "cpu")
    memory_worker._choose_encoder("hash")
    assert isinstance(sys.modules["sentence_transformers"].SentenceTransformer("x"), HashEncoder)


def test_the_hash_encoder_finds_shared_words():
    vectors = HashEncoder().encode(["my dog Rex", "MY DOG, rex!", "tax returns"])
    assert vectors.shape == (3, HashEncoder().get_sentence_embedding_dimension())
    assert vectors[0] @ vectors[1] == pytest.approx(1.0)
    assert vectors[0] @ vectors[2] < 0.5
    assert not HashEncoder().encode([""]).any()


def test_an_encoders_weights_are_hashed(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    task = MemoryVector(encoder=str(tmp_path))
    assert task._encoder_sha256() == hashlib.sha256(b"weights").hexdigest()
    assert task._about_trial()["encoder"] == tmp_path.name
    assert task._worker_config() == {"encoder": str(tmp_path)}
    assert MemoryKv()._encoder_sha256() is None


@engine
def test_an_encoder_folder_needs_sentence_transformers(bfcl_python, tmp_path):  # noqa: ARG001
    with pytest.raises(PrerequisiteError, match="KVBENCH_ENV_BFCL"):
        MemoryVector(encoder=str(tmp_path)).samples(1, 0)


def test_an_unknown_setting_is_a_usage_error():
    with pytest.raises(UsageError, match="encoder"):
        MemoryKv.create({"encodr": "hash"})


@pytest.fixture(scope="module")
def memory(bfcl_python):  # noqa: ARG001
    task = MemoryAllBackends(encoder="hash")
    yield task
    task.close()


@pytest.fixture
def ask(memory, endpoint):
    """Ask one question, its conversations scripted, too."""
    conversations = memory._call("conversations")

    def run(sample, agent, trial=0):
        session = f"run|{trial}|{len(endpoint.bodies)}|{sample.id}"
        wanted = (backend_of(sample.id), sample.cluster)
        mine = [c["id"] for c in conversations if (backend_of(c["id"]), c["scenario"]) == wanted]
        for number, name in enumerate(mine):
            endpoint.scripts[session_of(session, number)] = memory._script(name, agent)
        endpoint.scripts[session] = memory._script(sample.id, agent)
        return memory.run_trial(sample, TrialContext(trial, 7, None, endpoint.url, session))

    return run


@engine
def test_questions_take_the_backends_in_turn(memory):
    everything = memory.samples(None, 0)
    assert [backend_of(s.id) for s in everything[:6]] == ["kv", "vector", "rec_sum"] * 2
    assert len(everything) == 3 * 155
    assert {s.cluster for s in everything} == {
        "customer", "student", "finance", "healthcare", "notetaker",
    }  # fmt: skip


@engine
@pytest.mark.parametrize("backend", ["kv", "vector", "rec_sum"])
def test_what_a_conversation_stored_is_found_by_the_question(memory, ask, endpoint, backend):
    questions = [s for s in memory.samples(None, 0) if backend_of(s.id) == backend]
    sample, other = [s for s in questions if s.cluster == "finance"][:2]
    trial = ["kv", "vector", "rec_sum"].index(backend)
    first = ask(sample, "gold", trial)
    assert (first.status, first.score) == ("scored", 1.0), first.error
    assert first.metrics["prerequisites_played"] == 7
    assert first.metrics["prerequisites_peak_live"] == 7
    assert endpoint.violations == []
    stored = first.transcript["prerequisites"][0]["steps"][0]["calls"][0]["arguments"]
    result = first.transcript["steps"][0]["results"][0]
    assert (stored["key"] if backend == "kv" else stored["text"][:40]) in str(result)
    assert len(endpoint.closed) == 7
    second = ask(other, "corrupt", trial)
    assert (second.status, second.score) == ("scored", 0.0)
    assert second.metrics["prerequisites_played"] == 0
    assert second.metrics["snapshot_sha"] == first.metrics["snapshot_sha"]


@engine
def test_every_trial_index_has_its_own_memory(memory, ask):
    sample = next(s for s in memory.samples(None, 0) if s.cluster == "healthcare")
    outcomes = [ask(sample, "null", trial) for trial in (10, 11)]
    assert [o.metrics["prerequisites_played"] for o in outcomes] == [5, 5]
    assert [o.score for o in outcomes] == [0.0, 0.0]


@engine
def test_provenance_names_the_encoder(memory):
    assert memory.provenance()["encoder"] == "hash"
