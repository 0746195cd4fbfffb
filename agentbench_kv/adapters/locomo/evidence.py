"""What of a question's evidence was put before the model: sent by the task, or by a memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentbench_kv.adapters.base import Recalled
from agentbench_kv.adapters.locomo.data import Question, Utterance


def sent_share(question: Question, sent: Collection[str]) -> float | None:
    """Return the share of a question's evidence that is among some utterances' ids.

    None where the file names no evidence.
    """
    return share(question, dict.fromkeys(sent, 1.0))


def share(question: Question, before: Mapping[str, float] | None) -> float | None:
    """Return the share of a question's evidence that is before the model.

    `before` says how much of each utterance is, by its id. None where nobody knows, or the file
    names no evidence.
    """
    if before is None or not question.evidence:
        return None
    return sum(before.get(id, 0.0) for id in question.evidence) / len(question.evidence)


def recalled_shares(
    recalled: Recalled | None, spots: Mapping[str, int], spoken: Mapping[str, Utterance]
) -> dict[str, float] | None:
    """Return how much of each utterance a memory put before the model, by id; None if unknown.

    `spots` are the utterances' messages by number. A memory that does not name messages is read by
    its texts: what stands in them word for word. If nothing does, it wrote them anew, and nobody
    knows what they hold.
    """
    if recalled is None:
        return None
    if (named := recalled.messages) is not None:
        return {id: named[spot] for id, spot in spots.items() if spot in named}
    text = _plain("\n".join(recalled.texts))
    found = {id: 1.0 for id in spots if _plain(spoken[id].text) in text}
    return None if text and not found else found


def _plain(text: str) -> str:
    return " ".join(text.split())
