"""An LLM as judge of answers: a column of its own, never the score.

A judge is asked during a run, or about a finished run's transcripts (`judge_run`): then nothing is
run again.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from agentbench_kv.adapters.browser.answers import unseal
from agentbench_kv.errors import UsageError
from agentbench_kv.results.files import json_bytes, write_atomic
from agentbench_kv.results.records import TrialRecord
from agentbench_kv.results.run_reader import RunReader

# Role of a browsing transcript's last entry: question, gold answer, what was judged.
EVALUATION = "evaluation"
KEY_VARIABLE = "KVBENCH_JUDGE_KEY"
_ATTEMPTS = 3
_TIMEOUT_S = 120.0
# Judges that think first need room.
_MAX_TOKENS = 4096
JUDGE_PROMPT = """\
You check answers to questions. Below are a question, the known correct answer and a response.
Decide whether the response gives the correct answer. Other wording, spelling, units that mean the
same and correct extra detail are fine. A response that contradicts the correct answer, hedges
between several answers or gives none is wrong. Do not answer the question yourself.

Question: {question}

Correct answer: {gold}

Response: {response}

Think briefly, then end with one line: "Verdict: correct" or "Verdict: wrong".
"""
_VERDICT = re.compile(r"verdict\W*\b(correct|wrong)\b", re.IGNORECASE)


@dataclass(frozen=True)
class JudgeVerdict:
    """What the judge said: `correct` is None if it could not be asked or understood."""

    correct: bool | None
    reply: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Judge:
    """A model behind an OpenAI-compatible endpoint; its key comes from `KVBENCH_JUDGE_KEY`."""

    endpoint: str  # base URL, `http://host:port/v1`
    model: str
    pause_s: float = 1.0  # before the second attempt; twice that before the third
    # With places for `question`, `gold` and `response`; asks for a line `Verdict: …`.
    prompt: str = JUDGE_PROMPT

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `URL|MODEL`; UsageError if it is not that or the URL holds a secret."""
        endpoint, separator, model = text.partition("|")
        address = urlsplit(endpoint)
        if not separator or not model or address.scheme not in {"http", "https"}:
            raise UsageError(
                f"judge={text}: expected URL|MODEL, as in http://127.0.0.1:8000/v1|qwen"
            )
        if address.username or address.password or address.query:
            raise UsageError(f"the judge's URL must hold no secret; {KEY_VARIABLE} is for the key")
        return cls(endpoint.rstrip("/"), model)

    def provenance(self) -> dict[str, str]:
        sha = hashlib.sha256(self.prompt.encode()).hexdigest()
        return {"endpoint": self.endpoint, "model": self.model, "prompt_sha256": sha}

    def verdict(self, question: str, gold: str, response: str) -> JudgeVerdict:
        """Ask whether a response gives the correct answer, again after failures that may pass."""
        prompt = self.prompt.format(question=question, gold=gold, response=response)
        error = ""
        for attempt in range(_ATTEMPTS):
            time.sleep(attempt * self.pause_s)
            try:
                reply = self._ask(prompt)
            except httpx.HTTPStatusError as failure:
                error = f"the judge answered {failure.response.status_code}"
                if failure.response.status_code < 500 and failure.response.status_code != 429:
                    break
            except httpx.HTTPError as failure:
                error = f"the judge cannot be asked: {type(failure).__name__}"
            except (ValueError, KeyError, IndexError, TypeError):
                error = "the judge's endpoint did not answer with a chat completion"
            else:
                found = _VERDICT.findall(reply)
                if not found:
                    return JudgeVerdict(None, reply, "the judge gave no verdict")
                return JudgeVerdict(found[-1].lower() == "correct", reply)
        return JudgeVerdict(None, error=error)

    def _ask(self, prompt: str) -> str:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": _MAX_TOKENS,
        }
        key, url = os.environ.get(KEY_VARIABLE), f"{self.endpoint}/chat/completions"
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        response = httpx.post(url, json=body, headers=headers, timeout=_TIMEOUT_S)
        response.raise_for_status()
        content = response.json()["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError("no text")
        return content


@dataclass(frozen=True)
class JudgedRun:
    """The result of judging a run."""

    path: Path  # the file with every verdict
    trials: int  # finished ones
    judged: int  # those with a verdict, or without an answer: these count as wrong
    asked: int  # those the judge was asked about just now
    mean: float | None  # share of right answers; None as long as answers wait for a verdict
    errors: tuple[str, ...]  # why verdicts are missing, each reason once


@dataclass(frozen=True)
class _FinishedTrial:
    record: TrialRecord
    evaluation: dict[str, Any]  # the transcript's last entry; empty if it is none
    sealed: bool

    @property
    def response_sha(self) -> str:
        response = str(self.evaluation.get("response", ""))
        return hashlib.sha256(response.encode("utf-8", "replace")).hexdigest()

    @property
    def key(self) -> tuple[str, int, str]:
        return self.record.sample_id, self.record.trial, self.response_sha


def judge_run(
    run: Path, judge: Judge, *, concurrency: int = 8, report: Callable[[int], None] | None = None
) -> JudgedRun:
    """Ask a judge about every answer of a browsing run that it has not judged yet.

    At most `concurrency` requests run at once; `report` is told how many answers have been judged.
    UsageError if `run` is not a run, or its transcripts hold no answers to judge.
    """
    reader = RunReader(run)
    reader.info  # noqa: B018  refuses what is not a run
    finished = [_read(reader, record) for record in reader.trials() if record.finished]
    answered = [each for each in finished if each.evaluation and each.record.score is not None]
    if not answered:
        raise UsageError(f"{run} holds no answers to judge; only browsing tasks have them")
    path = run / _file_name(judge)
    known = _known(path)
    todo = [each for each in answered if each.key not in known]
    with ThreadPoolExecutor(concurrency) as pool:
        rows = pool.map(partial(_ask, judge), todo)
        for count, (trial, row) in enumerate(zip(todo, rows, strict=True), start=1):
            known[trial.key] = row
            if report:
                report(count)
    trials = [known.get(each.key) or _unanswered(each.record) for each in finished]
    marks = [row["judge"] for row in trials if row["judge"] is not None]
    errors = sorted({row["error"] for row in trials if row["error"] and row["judge"] is None})
    mean = sum(marks) / len(marks) if len(marks) == len(trials) else None
    document = {
        "judge": judge.provenance(),
        "note": "A judge's verdicts; the score of the run is EM-norm and stays as it is.",
        "mean": mean,
        "trials": trials,
    }
    write_atomic(path, json_bytes(document, indent=1))
    return JudgedRun(path, len(trials), len(marks), len(todo), mean, tuple(errors))


def _read(reader: RunReader, record: TrialRecord) -> _FinishedTrial:
    stored = (reader.transcript(record) or {}).get("transcript")
    entries = unseal(stored)
    last = entries[-1] if isinstance(entries, list) and entries else None
    evaluation = last if isinstance(last, dict) and last.get("role") == EVALUATION else {}
    return _FinishedTrial(record, evaluation, entries is not stored)


def _ask(judge: Judge, trial: _FinishedTrial) -> dict[str, Any]:
    fields = trial.evaluation
    verdict = judge.verdict(fields["question"], fields["gold"], fields["response"])
    return {
        "sample_id": trial.record.sample_id,
        "trial": trial.record.trial,
        "response_sha256": trial.response_sha,
        "score": trial.record.score,
        "judge": None if verdict.correct is None else float(verdict.correct),
        "error": verdict.error,
        # A judge repeats questions and answers.
        "reply": None if trial.sealed else verdict.reply,
    }


def _unanswered(record: TrialRecord) -> dict[str, Any]:
    return {
        "sample_id": record.sample_id,
        "trial": record.trial,
        "score": record.score,
        "judge": 0.0,
        "error": None,
        "status": str(record.status),
    }


def _known(path: Path) -> dict[tuple[str, int, str], dict[str, Any]]:
    """Return earlier verdicts of the same judge; failed ones are asked again."""
    rows = json.loads(path.read_bytes())["trials"] if path.is_file() else []
    return {
        (row["sample_id"], row["trial"], row["response_sha256"]): row
        for row in rows
        if "response_sha256" in row and row["judge"] is not None
    }


def _file_name(judge: Judge) -> str:
    return verdicts_file("judge", judge.model, judge.provenance())


def verdicts_file(first: str, model: str, about: Any) -> str:
    """Return the name of a file of verdicts: by model, and all that they depend on."""
    spelled = json.dumps(about, sort_keys=True)
    slug = re.sub(r"[^A-Za-z0-9.-]+", "_", model).strip("._")[:40] or "model"
    return f"{first}-{slug}-{hashlib.sha256(spelled.encode()).hexdigest()[:8]}.json"
