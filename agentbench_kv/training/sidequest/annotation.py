"""The answer that a trained model is to give when it is asked for expired cursors.

The reasoning is written by rule, a line for every open result, or by a model behind an endpoint
that is told what the right answer is (Algorithm 2, line 19). The verdict is the same either way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import httpx

from agentbench_kv.adapters.probe.session import ChatSession, text_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.gateway.cursors import with_cursors
from agentbench_kv.training.sidequest.hindsight import WORD, CursorUse, expired

_LONGEST_NAME = 40  # characters
_LONGEST_RESULT = 600  # characters of a message that the annotating model is shown
_TIMEOUT_S = 120.0
_TOLD = """An agent works with tools; every result has a number. Below is what has happened so far.
Of the open results {open}, those that will not be needed any more are: {gone}.

Write what the agent might think, at this moment and from what it has seen, to come to that answer:
go over each open result in turn, then say which can go. Be brief. Do not let on that you were told
the answer, and do not speak of anything that comes later.

{story}"""


@dataclass(frozen=True)
class ExpiryQuestion:
    """A moment of a trace at which the model is asked."""

    session: ChatSession
    request: int  # the answer to it is not known yet
    open: tuple[CursorUse, ...]
    told: tuple[int, ...]  # open cursors that it is to name
    shown: str = ""  # the text that it sees: the session without what has left, and the question

    @property
    def read(self) -> int:
        """Messages of the session that the model has read by then."""
        return self.session.answers[self.request - 1]

    @property
    def expired(self) -> tuple[int, ...]:
        """Open cursors that nothing uses from now on, whether that can be told or not."""
        return tuple(sorted(expired(self.open, self.request)))


Annotator = Callable[[ExpiryQuestion], str]


def verdict(named: Sequence[int]) -> str:
    """Return the command that ends the answer."""
    return json.dumps({"del_cursors": list(named)})


def by_rule(question: ExpiryQuestion) -> str:
    """Return the reasoning about a question's open cursors."""
    results = with_cursors(question.session.messages)
    texts = {use.cursor: text_of(dict(results[use.message])) for use in question.open}
    return reasoning(texts, question.told, question.shown)


def reasoning(results: Mapping[int, str], done: Collection[int], shown: str) -> str:
    """Return a line for every cursor up to the last open one, and what follows from it.

    `results` are the texts of open ones, `shown` is all that the model sees. The line of an open
    one goes on behind its number as the result does, up to the first name in it, for which its
    newest mention stands; then `keep`, or `done` with all that are done so far: the command is a
    copy of the last such list. Those that left are listed too, because a small model counts on
    where it should skip.
    """
    newest = {_name(word): word for word in WORD.findall(shown)}
    lines: list[str] = []
    listed: list[int] = []
    for cursor in range(max(results, default=-1) + 1):
        if cursor not in results:
            lines.append(f"{cursor},-")
            continue
        state = "keep"
        if cursor in done:
            listed.append(cursor)
            state = f"done {json.dumps(listed)}"
        opening, name = _beginning(results[cursor], cursor)
        lines.append(f"{cursor}{opening}{newest.get(name, name)[:_LONGEST_NAME]},{state}")
    return "\n".join(lines)


def by_model(url: str, model: str, key: str = "") -> Annotator:
    """Return an annotator that asks a chat endpoint; PrerequisiteError where that fails."""
    client = httpx.Client(
        timeout=_TIMEOUT_S, headers={"Authorization": f"Bearer {key}"} if key else {}
    )

    def annotate(question: ExpiryQuestion) -> str:
        asked = _TOLD.format(
            open=[use.cursor for use in question.open],
            gone=list(question.told) or "none of them",
            story=_story(question),
        )
        body = {"model": model, "messages": [{"role": "user", "content": asked}], "temperature": 0}
        try:
            answer = client.post(f"{url.rstrip('/')}/chat/completions", json=body)
            answer.raise_for_status()
            text = answer.json()["choices"][0]["message"]["content"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise PrerequisiteError(
                f"the annotating model at {url} did not answer: {error}"
            ) from error
        return str(text or "").strip() or by_rule(question)

    return annotate


def _beginning(text: str, cursor: int) -> tuple[str, str]:
    """Return what stands between a result's cursor and the first name in it, and that name."""
    behind = text.partition(str(cursor))[2]
    words = (word for word in WORD.finditer(behind) if behind[word.end() :][:2] != '":')
    first = next(words, None)  # that is no key of an object
    if first is None:
        return ",", "result"
    opening = behind[: first.start()]
    return (opening if len(opening) <= _LONGEST_NAME else ","), _name(first.group())


def _name(word: str) -> str:
    """Return what a word begins with: `bag` of `bag/timu`, `bag+saka` and `bag`."""
    return re.split(r"\W", word, maxsplit=1)[0]


def _story(question: ExpiryQuestion) -> str:
    lines, cursors = [], {use.message: use.cursor for use in question.open}
    for at, message in enumerate(question.session.messages[: question.read]):
        name = f"result {cursors[at]}" if at in cursors else str(message["role"])
        calls: Sequence[object] = message.get("tool_calls") or ()
        text = " ".join([text_of(message), *(json.dumps(call) for call in calls)])
        lines.append(f"[{name}] {text[:_LONGEST_RESULT]}")
    return "\n".join(lines)
