"""An LLM as judge of answers: a column of its own, never the score."""

from __future__ import annotations

import hashlib
import os
import re
import time
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import urlsplit

import httpx

from agentbench_kv.errors import UsageError

KEY_VARIABLE = "KVBENCH_JUDGE_KEY"
_ATTEMPTS = 3
_TIMEOUT_S = 120.0
# Judges that think first need room.
_MAX_TOKENS = 4096
_PROMPT = """\
You check answers to questions. Below are a question, the known correct answer and a response.
Decide whether the response gives the correct answer. Other wording, spelling, units that mean the
same and correct extra detail are fine. A response that contradicts the correct answer, hedges
between several answers or gives none is wrong. Do not answer the question yourself.

Question: {question}

Correct answer: {gold}

Response: {response}

Think briefly, then end with one line: "Verdict: correct" or "Verdict: wrong".
"""
PROMPT_SHA = hashlib.sha256(_PROMPT.encode()).hexdigest()
_VERDICT = re.compile(r"verdict\W*\b(correct|wrong)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Verdict:
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
        """Return what results record."""
        return {"endpoint": self.endpoint, "model": self.model, "prompt_sha256": PROMPT_SHA}

    def verdict(self, question: str, gold: str, response: str) -> Verdict:
        """Ask whether a response gives the correct answer, again after failures that may pass."""
        prompt = _PROMPT.format(question=question, gold=gold, response=response)
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
                    return Verdict(None, reply, "the judge gave no verdict")
                return Verdict(found[-1].lower() == "correct", reply)
        return Verdict(None, error=error)

    def _ask(self, prompt: str) -> str:
        body: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 0.0,
            "max_tokens": _MAX_TOKENS,
        }
        key = os.environ.get(KEY_VARIABLE)
        response = httpx.post(
            f"{self.endpoint}/chat/completions",
            json=body,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=_TIMEOUT_S,
        )
        response.raise_for_status()
        content = response.json()["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise TypeError("no text")
        return content
