"""A past that is taken in with interruptions is the one that is taken in without."""

from __future__ import annotations

import errno
import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from parrot import Parrot, past

from agentbench_kv.adapters.base import PastSession
from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.embedded.engine import EmbeddedEngine
from agentbench_kv.errors import KVBenchError, PrerequisiteError, UsageError
from agentbench_kv.gateway import Gateway, open_gateway, recall
from agentbench_kv.gateway.checkpoints import Checkpoints
from agentbench_kv.gateway.memory import Remembered
from agentbench_kv.gateway.recall import PlainMemories, Recollection
from agentbench_kv.registry import make_method
from agentbench_kv.results import files

ABOUT = {"model_sha": "a"}
PASTS = [past("red apple", "green pear"), past("lost plum", first=3), past("red fig", first=4)]


class Killed(BaseException):
    """The end of a process."""


class Folder:
    """A folder of checkpoints; counts those that were written whole."""

    def __init__(self, root: Path, step: Callable[[str], None] = lambda _: None) -> None:
        self.root = root
        self.step = step
        self.written = 0

    def checkpoint(self, name: str) -> Path:
        return self.root / name

    @contextmanager
    def keeping(self, name: str) -> Iterator[IO[bytes]]:
        with files.replacing(self.checkpoint(name)) as file:
            yield file
        self.written += 1
        self.step("after a checkpoint")


class Clock:
    """Time that passes as a process does something, in seconds that add up exactly."""

    def __init__(self, stop: int | None = None) -> None:
        self.now = 0.0
        self.steps: list[str] = []
        self._stop = stop

    def step(self, what: str) -> None:
        self.steps.append(what)
        self.now += 0.125
        if len(self.steps) - 1 == self._stop:
            raise Killed(what)


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    method = make_method("mem0", None, {})
    engine = EmbeddedEngine.create(EngineOptions("micro", method.below(), device="cpu"))
    made = open_gateway(engine, method)
    assert isinstance(made, Gateway)
    yield made
    engine.shutdown()


def memories(gateway: Gateway, store: Parrot, folder: Folder, **about: str) -> PlainMemories:
    kept = Checkpoints(folder, lambda bank: bank.partition("|")[0], {**ABOUT, **about})
    return PlainMemories(gateway, store, kept)


def tell(
    gateway: Gateway,
    folder: Folder,
    told: Sequence[PastSession],
    *,
    stop: int | None = None,
    attempt: int = 1,
    **about: str,
) -> tuple[list[Remembered], list[Recollection]]:
    """Tell a trial's past in a new process; return what each session took, and the bank."""
    clock, bank = Clock(stop), f"trial|{attempt}"
    store = Parrot(gateway, clock.step)
    folder.step = clock.step
    made = memories(gateway, store, folder, **about)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recall, "time", SimpleNamespace(perf_counter=lambda: clock.now))
        try:
            took = [made.remember(bank, each) for each in told]
            return took, store.banks.get(bank, [])
        finally:
            made.forget(bank)


def costs(took: Sequence[Remembered]) -> list[Remembered]:
    return [replace(each, files=0, files_s=0.0) for each in took]


TEXTS = st.lists(st.sampled_from(["red apple", "green pear", "lost plum"]), max_size=3)
STOPS = st.lists(st.integers(0, 25), max_size=3)


@settings(max_examples=40)
@given(st.lists(TEXTS, min_size=1, max_size=4), STOPS)
def test_wherever_it_is_interrupted_it_comes_to_the_same(
    gateway: Gateway,
    tmp_path_factory: pytest.TempPathFactory,
    texts: list[list[str]],
    stops: list[int],
) -> None:
    told = [past(*each, first=3 * number + 1) for number, each in enumerate(texts)]
    calm = tell(gateway, Folder(tmp_path_factory.mktemp("calm")), told)
    assert [each.calls for each in calm[0]] == [len(each) for each in texts]
    assert [each.files for each in calm[0]] == [0] * len(told)
    folder = Folder(tmp_path_factory.mktemp("stormy"))
    for attempt, stop in enumerate(stops):
        with suppress(Killed):  # or it comes to its end before that point
            tell(gateway, folder, told, stop=stop, attempt=attempt)
        assert gateway.sessions() == []
    took, bank = tell(gateway, folder, told, attempt=9)
    kept = sum(each.files for each in took)
    assert costs(took) == calm[0]
    assert bank == calm[1]
    assert [each.files for each in took] == [1] * kept + [0] * (len(told) - kept)
    # What was taken in whole is not told again.
    assert folder.written == len(told)
    assert [path.name for path in folder.root.iterdir()] == ["trial"]


def test_every_point_of_a_telling(gateway: Gateway, tmp_path: Path) -> None:
    calm = tell(gateway, Folder(tmp_path), PASTS)
    seen = set()
    for stop in range(100):
        folder = Folder(tmp_path / str(stop))
        folder.root.mkdir()
        try:
            tell(gateway, folder, PASTS, stop=stop)
            break
        except Killed as killed:
            seen.add(str(killed))
        took, bank = tell(gateway, folder, PASTS, attempt=2)
        assert (costs(took), bank) == calm
        assert folder.written == len(PASTS)
    assert seen == {
        "before a request", "after a request", "in the middle of a checkpoint",
        "after a checkpoint",
    }  # fmt: skip
    # Four messages, three checkpoints of two, three and four lines.
    assert stop == 2 * 4 + (2 + 3 + 4) + 3


@pytest.fixture
def kept(gateway: Gateway, tmp_path: Path) -> Folder:
    """A checkpoint behind the first two past sessions."""
    folder = Folder(tmp_path)
    tell(gateway, folder, PASTS[:2])
    return folder


def test_a_later_attempt_goes_on_and_says_so(gateway: Gateway, kept: Folder, caplog: Any) -> None:
    caplog.set_level("INFO")
    took, _ = tell(gateway, kept, PASTS, attempt=2)
    assert [each.files for each in took] == [1, 1, 0]
    assert sum(each.files_s for each in took) > 0
    assert [each.failed for each in took] == [0, 1, 0]
    assert "an interrupted run took in 2 past sessions" in caplog.text


def test_what_was_kept_under_other_conditions_is_told_anew(
    gateway: Gateway, kept: Folder, caplog: Any
) -> None:
    took, bank = tell(gateway, kept, PASTS, model_sha="b")
    assert [each.files for each in took] == [0, 0, 0]
    assert [each.text for each in bank] == ["red apple", "green pear", "lost plum", "red fig"]
    (line,) = [each.getMessage() for each in caplog.records]
    assert "is not gone on from" in line
    assert line.endswith("model_sha is a there and b here")


def test_another_version_of_the_package_tells_anew(
    gateway: Gateway, kept: Folder, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Parrot, "versions", lambda _: {"parrot": "2"})
    assert [each.files for each in tell(gateway, kept, PASTS)[0]] == [0, 0, 0]
    assert "parrot is 1 there and 2 here" in caplog.text


def damages(whole: bytes) -> Iterator[bytes]:
    for size in (0, 1, 9, 20, len(whole) // 2, len(whole) - 9, len(whole) - 1):
        yield whole[:size]
    for place in range(10, len(whole), 7):
        yield whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]
    yield b"no checkpoint at all"
    for other in ({}, [], {"format": "kvbench checkpoint 1"}):
        yield gzip.compress(json.dumps(other).encode() + b"\n")


WRONG = [
    {"calls": "x"}, {"calls": -5}, {"tokens": None}, {"tokens": 1.5}, {"files": True},
    {"seconds": -1e9}, {"seconds": float("nan")}, {"seconds": float("inf")}, {"more": 1},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_a_checkpoint_of_no_amounts_is_told_anew(
    gateway: Gateway, kept: Folder, caplog: Any, wrong: dict[str, Any]
) -> None:
    path = kept.checkpoint("trial")
    line, _, bank = gzip.decompress(path.read_bytes()).partition(b"\n")
    head = json.loads(line)
    head["told"][0][1] |= wrong
    path.write_bytes(gzip.compress(json.dumps(head).encode() + b"\n" + bank))
    took, _ = tell(gateway, kept, PASTS[:1], attempt=7)
    assert [each.files for each in took] == [0]
    assert "is not gone on from" in caplog.text
    assert next(iter(wrong)) in caplog.text


def test_a_damaged_checkpoint_is_told_anew(gateway: Gateway, kept: Folder, caplog: Any) -> None:
    path = kept.checkpoint("trial")
    whole = path.read_bytes()
    for number, damaged in enumerate(damages(whole)):
        path.write_bytes(damaged)
        caplog.clear()
        took, bank = tell(gateway, kept, PASTS[:1], attempt=number)
        assert [each.files for each in took] == [0], damaged
        assert [each.text for each in bank] == ["red apple", "green pear"]
        assert "is not gone on from" in caplog.text


def test_another_past_is_refused(gateway: Gateway, kept: Folder) -> None:
    with pytest.raises(UsageError, match="past session 2 is another one there") as refused:
        tell(gateway, kept, [PASTS[0], past("blue plum", first=3)])
    assert str(kept.checkpoint("trial")) in str(refused.value)
    later = replace(PASTS[0], numbers=[None, 1, 3])
    with pytest.raises(UsageError, match="past session 1 is another one there"):
        tell(gateway, kept, [later])


def test_a_bank_that_holds_more_than_was_told_is_not_asked(gateway: Gateway, kept: Folder) -> None:
    made = memories(gateway, Parrot(gateway), kept)
    made.remember("trial|2", PASTS[0])
    with pytest.raises(UsageError, match="holds 2 past sessions, and 1 are told"):
        made.shown("trial|2", [{"role": "user", "content": "apple"}])
    made.remember("trial|2", PASTS[1])
    asked = made.shown("trial|2", [{"role": "user", "content": "apple"}])
    assert "red apple" in asked[0]["content"]
    made.forget("trial|2")


def test_a_full_disk_does_not_cost_what_was_kept(
    gateway: Gateway, kept: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = kept.checkpoint("trial").read_bytes()
    for name in ("unpack", "pack"):
        with monkeypatch.context() as patch:
            patch.setattr(Parrot, name, full)
            with pytest.raises(PrerequisiteError, match=r"(?i)no space left"):
                tell(gateway, kept, PASTS)
        assert kept.checkpoint("trial").read_bytes() == before
    assert [each.files for each in tell(gateway, kept, PASTS)[0]] == [1, 1, 0]


def test_what_is_told_while_the_run_ends_is_not_kept(tmp_path: Path) -> None:
    """A package may take a refused request for a failure of the model's."""

    class Forgiving(Parrot):
        def add(self, bank: str, session: str, past: PastSession) -> int:
            self._gateway.stop(KVBenchError("the run has ended"))
            with pytest.raises(KVBenchError):
                super().add(bank, session, past)
            return 1

    method = make_method("mem0", None, {})
    engine = EmbeddedEngine.create(EngineOptions("micro", method.below(), device="cpu"))
    made, folder = open_gateway(engine, method), Folder(tmp_path)
    assert isinstance(made, Gateway)
    with pytest.raises(KVBenchError, match="the run has ended"):
        memories(made, Forgiving(made), folder).remember("trial|1", PASTS[0])
    assert folder.written == 0
    engine.shutdown()
