"""What of a question's evidence was put before the model: sent by the task, or by a memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from agentbench_kv.adapters.base import Recalled
from agentbench_kv.adapters.locomo.data import Question, Utterance


def share(question: Question, before: Collection[str] | None) -> float | None:
    """Return the share of a question's evidence that is among some utterances' ids.

    None where nobody knows what was before the model, or the file names no evidence.
    """
    if before is None or not question.evidence:
        return None
    return sum(id in before for id in question.evidence) / len(question.evidence)


def recalled_ids(
    recalled: Recalled | None, spots: Mapping[str, int], spoken: Mapping[str, Utterance]
) -> frozenset[str] | None:
    """Return the ids of the utterances that a memory put before the model; None if unknown.

    `spots` are the utterances' messages by number. A memory that does not name messages is read by
    its texts: what stands in them word for word. If nothing does, it wrote them anew, and nobody
    knows what they hold.
    """
    if recalled is None:
        return None
    if recalled.messages is not None:
        named = frozenset(recalled.messages)
        return frozenset(id for id, spot in spots.items() if spot in named)
    text = _plain("\n".join(recalled.texts))
    found = frozenset(id for id in spots if _plain(spoken[id].text) in text)
    return None if text and not found else found


def _plain(text: str) -> str:
    return " ".join(text.split())
