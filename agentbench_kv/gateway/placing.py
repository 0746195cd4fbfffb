"""Where the messages of a request stand in the text that a chat template makes of them."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from agentbench_kv.gateway.messages import Message, text_of
from agentbench_kv.methods.spans import SpanRange
from agentbench_kv.phases.tokens import IncrementalDecoder, TokenCodec

# Stands for a message's content; no template rewrites it and no message holds it.
_MARK = "kvbench-3f0b-place-{}-kvbench"
_FIND = re.compile(_MARK.format(r"(\d+)"))


def content_spans(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message]
) -> list[SpanRange | None]:
    """Return where each message's content stands, in characters of what `render` returns.

    The messages are rendered a second time with marks for contents: what stands between two marks
    stands between the contents, too. None for a message whose place that does not show.
    """
    found = _content_spans(render, messages, empty=True)
    if all(span or each.get("tool_calls") for span, each in zip(found, messages, strict=True)):
        return found
    # The template may leave out a content that is empty, with what stands around it.
    without = _content_spans(render, messages, empty=False)
    return max(found, without, key=lambda spans: len(spans) - spans.count(None))


def _content_spans(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], *, empty: bool
) -> list[SpanRange | None]:
    marked = [
        {**message, "content": _MARK.format(number)}
        if text_of(message.get("content")) or (empty and not message.get("tool_calls"))
        else message
        for number, message in enumerate(messages)
    ]
    text, pieces = render(messages), _FIND.split(render(marked))
    found: list[SpanRange | None] = [None] * len(messages)
    at = len(pieces[0])
    if not text.startswith(pieces[0]):
        return found
    for number, behind in zip(map(int, pieces[1::2]), pieces[2::2], strict=True):
        size = _size(text, at, text_of(messages[number].get("content")), behind)
        if size is None:
            return found
        found[number] = (at, at + size)
        at += size + len(behind)
    return found


def _size(text: str, at: int, content: str, behind: str) -> int | None:
    """Return how long a content is that stands in a text from `at` on, with `behind` after it."""
    for written in (content, content.strip()):
        if text.startswith(written + behind, at):
            return len(written)
    return None


def token_spans(
    codec: TokenCodec, ids: Sequence[int], text: str, spans: Sequence[SpanRange | None]
) -> list[SpanRange | None]:
    """Return the tokens that lie wholly within spans of a text's characters.

    `ids` are the text's, or those of its end; None where they do not decode to it.
    """
    decoder = IncrementalDecoder(codec)
    pieces = [decoder.feed(token) for token in ids]
    decoded = "".join(pieces) + decoder.finish()
    if not text.endswith(decoded):
        return [None] * len(spans)
    shift = len(text) - len(decoded)
    # Where each token begins, and the text ends; a character's bytes come with its last token.
    edges = [shift + size for size in accumulate(map(len, pieces), initial=0)]
    edges[-1] = len(text)
    return [None if span is None else _within(edges, span) for span in spans]


def _within(edges: Sequence[int], span: SpanRange) -> SpanRange:
    """Return the tokens that begin and end within a span, given all edges between tokens."""
    begin, end = bisect_left(edges, span[0]), bisect_left(edges, span[1])
    if end == len(edges) or edges[end] != span[1]:
        end -= 1
    return begin, max(begin, end)
