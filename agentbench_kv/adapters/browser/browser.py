"""One agent's browser: every result is a page on a stack, known by its number, the cursor.

The semantics follow what SideQuest's agents used (gpt-oss' simple browser): `search`, `open` by
link or URL, `find` in a page; a view shows numbered lines up to a token cap, and each call pushes
one page, so that a cursor names one tool result. `TOOLS` are its OpenAI function schemas, and
`call_tool` answers calls with arguments that a model wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from agentbench_kv.adapters.browser.corpus import Corpus, lines_of

TokenCount = Callable[[str], int]  # of a text; a tokenizer's `len(encode(text))` is one too
VIEW_TOKENS = 1024
RESULTS = 10
_MOST_MATCHES = 50
_MATCH_LINES = 3
_TITLE = 200
_SNIPPET = 120
_LETTERS_A_TOKEN = 4
_WORD = re.compile(r"[A-Za-z]+")
_WIDE = re.compile(r"[\u0800-\U0010ffff]")
_SINGLE = re.compile(r"[^A-Za-z \t]")


def estimate_tokens(text: str) -> int:
    """Return the estimated number of tokens of a text.

    An adapter never sees tokens, and views must be the same for every model. What is counted is
    word pieces of at most four letters, every digit and every mark on its own: on English prose
    more than a byte-level BPE tokenizer of 100k entries or more makes of it.

    >>> estimate_tokens("L12: The capital is Paris.")
    11
    """
    words = sum(-(-len(word) // _LETTERS_A_TOKEN) for word in _WORD.findall(text))
    # Scripts beyond the two-byte range cost about two tokens a character.
    return words + len(_SINGLE.findall(text)) + len(_WIDE.findall(text))


class BrowserError(Exception):
    """A call the browser cannot answer; the message is for the agent, and no page is pushed."""


@dataclass(frozen=True)
class BrowserView:
    """What a call shows, and the cursor of its page; None if it could not be answered."""

    text: str
    cursor: int | None = None

    @property
    def failed(self) -> bool:
        return self.cursor is None


class _Link(NamedTuple):
    document: int
    line: int = 0


@dataclass(frozen=True)
class _OpenPage:
    kind: Literal["document", "search", "find"]
    title: str
    url: str
    lines: tuple[str, ...]
    links: tuple[_Link, ...] = ()
    document: int | None = None


class Browser:
    """Search, open and find over a corpus; nothing outside the corpus can be reached.

    Many browsers may share a `corpus`. `view_tokens` are the most tokens of a view, as `count`
    counts them (an estimate by default, because views must not depend on the model); `results` are
    the most results of a search.
    """

    def __init__(
        self,
        corpus: Corpus,
        *,
        view_tokens: int = VIEW_TOKENS,
        results: int = RESULTS,
        count: TokenCount = estimate_tokens,
    ) -> None:
        self.corpus = corpus
        self.opened: list[str] = []
        self._view_tokens = view_tokens
        self._results = results
        self._count = count
        self._pages: list[_OpenPage] = []

    def search(self, query: str, topn: int = -1) -> BrowserView:
        """Show the best documents for a query, as numbered links."""
        if not query.strip():
            raise BrowserError("the query is empty")
        count = min(topn, self._results) if topn > 0 else self._results
        found = self.corpus.index.search(query, count)
        lines: list[str] = []
        for link, document in enumerate(map(self.corpus.document, found)):
            beginning = " ".join(document.text[: 2 * _SNIPPET].split())[:_SNIPPET]
            head = f"[{link}] {_one_line(document.title)} ({document.url})"
            lines += lines_of(f"{head}\n{beginning}")
        title, shown = f"Search results for: {_one_line(query)}", tuple(lines)
        links = tuple(map(_Link, found))
        page = _OpenPage("search", title, "search", shown or ("No document matches.",), links)
        return self._push(page, 0, -1)

    def open(
        self, id: int | str = -1, cursor: int = -1, loc: int = -1, num_lines: int = -1
    ) -> BrowserView:
        """Show a document, or another part of a page, `num_lines` from line `loc` on.

        `id` is a link of the page at `cursor` (-1: the current page), a URL of the corpus, or -1:
        that page itself. Without `loc` a view begins at the beginning, or at the match that the
        link points to; without `num_lines` it shows as many as it holds. BrowserError if there is
        no such page, link, URL or line.
        """
        if isinstance(id, str):
            number = self.corpus.number(id)
            if number is None:
                raise BrowserError(f"no document {id} in the corpus; search for it")
            return self._open(_Link(number), loc, num_lines)
        page = self._page(cursor)
        if id == -1:
            return self._push(page, max(loc, 0), num_lines)
        if not 0 <= id < len(page.links):
            if (number := self.corpus.number(str(id))) is not None:  # its name is a number
                return self._open(_Link(number), loc, num_lines)
            last = len(page.links) - 1
            there = f"its links are 0 to {last}" if page.links else "it has none"
            raise BrowserError(f"no link {id} on that page: {there}")
        return self._open(page.links[id], loc, num_lines)

    def find(self, pattern: str, cursor: int = -1) -> BrowserView:
        """Show where a text occurs in the document at `cursor`, case and line breaks aside."""
        page = self._page(cursor)
        wanted = " ".join(pattern.casefold().split())
        if not wanted:
            raise BrowserError("the pattern is empty")
        if page.kind != "document" or page.document is None:
            raise BrowserError(f"find works in a document, and that page is a {page.kind} result")
        places = _places(page.lines, wanted)
        lines: list[str] = []
        for link, line in enumerate(places):
            lines += [f"[{link}] match at L{line}", *page.lines[line : line + _MATCH_LINES]]
        title, shown = f"Find results for: {_one_line(pattern)} in {page.title}", tuple(lines)
        links = tuple(_Link(page.document, line) for line in places)
        found = _OpenPage("find", title, page.url, shown or ("No match.",), links)
        return self._push(found, 0, -1)

    def _open(self, link: _Link, loc: int, num_lines: int) -> BrowserView:
        document = self.corpus.document(link.document)
        lines = lines_of(document.text)
        page = _OpenPage("document", document.title, document.url, lines, document=link.document)
        view = self._push(page, link.line if loc < 0 else loc, num_lines)
        self.opened.append(document.url)
        return view

    def _page(self, cursor: int) -> _OpenPage:
        if not self._pages:
            raise BrowserError("no page is open yet; search first")
        if not -1 <= cursor < len(self._pages):
            raise BrowserError(
                f"no page has cursor {cursor}; the last one is {len(self._pages) - 1}"
            )
        return self._pages[cursor]

    def _push(self, page: _OpenPage, loc: int, num_lines: int) -> BrowserView:
        if loc >= len(page.lines):
            raise BrowserError(f"no line {loc}: the page ends at line {len(page.lines) - 1}")
        cursor = len(self._pages)
        text = self._render(page, cursor, loc, num_lines)
        self._pages.append(page)
        return BrowserView(text, cursor)

    def _render(self, page: _OpenPage, cursor: int, loc: int, num_lines: int) -> str:
        last = len(page.lines) - 1
        title = _one_line(page.title)[:_TITLE]
        most = last if num_lines < 1 else min(last, loc + num_lines - 1)
        # The range is known only at the end, so room for its longest form is set aside.
        header = f"[{cursor}] {title} ({page.url})\nviewing lines [{loc} - {most}] of {last}\n"
        room = self._view_tokens - self._count(header)
        shown: list[str] = []
        for number in range(loc, most + 1):
            line = f"L{number}: {page.lines[number]}"
            room -= self._count("\n" + line)
            if room < 0 and shown:
                break
            shown.append(line)
        end = loc + len(shown) - 1
        viewing = f"viewing lines [{loc} - {end}] of {last}"
        return "\n".join([f"[{cursor}] {title} ({page.url})", viewing, "", *shown])


def _places(lines: tuple[str, ...], wanted: str) -> list[int]:
    """Return the lines in which a match begins; it may go on in the lines below."""
    folded = [" ".join(line.casefold().split()) for line in lines]
    found: list[int] = []
    for number, line in enumerate(folded):
        ahead = line
        below = number + 1
        while len(ahead) < len(line) + len(wanted) and below < len(folded):
            ahead += " " + folded[below]
            below += 1
        if 0 <= ahead.find(wanted) < max(len(line), 1):
            found.append(number)
            if len(found) == _MOST_MATCHES:
                break
    return found


def _one_line(text: str) -> str:
    return " ".join(text.split())


_INTEGER = {"type": "integer"}
_CURSOR = {**_INTEGER, "description": "Cursor of a page; -1, the default, is the current page."}


def _tool(name: str, text: str, required: list[str], properties: dict[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": required}
    function = {"name": name, "description": text, "parameters": parameters}
    return {"type": "function", "function": function}


TOOLS: list[dict[str, Any]] = [
    _tool(
        "search",
        "Search the corpus. Shows results as links [0], [1], … on a new page.",
        ["query"],
        {"query": {"type": "string"}, "topn": {**_INTEGER, "description": "Most results to show."}},
    ),
    _tool(
        "open",
        "Open link `id` of the page at `cursor`, or a URL given as `id`, from line `loc` on. "
        "Without `id`, show another part of the page at `cursor`.",
        [],
        {
            "id": {"type": ["integer", "string"], "description": "Link number, or a URL."},
            "cursor": _CURSOR,
            "loc": {**_INTEGER, "description": "First line to show."},
            "num_lines": {**_INTEGER, "description": "Most lines to show."},
        },
    ),
    _tool(
        "find",
        "Find a text in the document at `cursor`. Matches are links that `open` takes.",
        ["pattern"],
        {"pattern": {"type": "string"}, "cursor": _CURSOR},
    ),
]
_PARAMETERS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}


def call_tool(browser: Browser, name: str, arguments: str | Mapping[str, Any]) -> BrowserView:
    """Answer a tool call; whatever is wrong with it comes back as text.

    `arguments` are an object or, as models write them, its JSON text.
    """
    try:
        if name not in _PARAMETERS:
            raise BrowserError(f"no tool {name!r}; there are {', '.join(_PARAMETERS)}")
        view: BrowserView = getattr(browser, name)(**_checked(name, arguments))
    except BrowserError as error:
        return BrowserView(f"Error: {error}")
    return view


def _checked(name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    properties, required = _PARAMETERS[name]["properties"], _PARAMETERS[name]["required"]
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise BrowserError("the arguments are not JSON") from None
    if not isinstance(arguments, Mapping):
        raise BrowserError("the arguments are not a JSON object")
    if unknown := sorted(set(arguments) - set(properties)):
        takes = ", ".join(properties)
        raise BrowserError(f"{name} takes {takes}, not {', '.join(map(str, unknown))}")
    if missing := [each for each in required if arguments.get(each) is None]:
        raise BrowserError(f"{name} needs {missing[0]!r}")
    return {
        key: _value(key, value, properties[key]["type"])
        for key, value in arguments.items()
        if value is not None
    }


def _value(key: str, value: Any, kinds: str | list[str]) -> int | str:
    """Return an argument as its tool takes it; models write numbers as text and the reverse."""
    if "integer" in kinds and (number := _whole(value)) is not None:
        return number
    if "string" in kinds and isinstance(value, str | int | float) and not isinstance(value, bool):
        return str(value)
    raise BrowserError(f"{key} must be {'a number' if 'integer' in kinds else 'a text'}")


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        digits = value.strip().removeprefix("-")
        value = int(value) if digits.isascii() and digits.isdigit() and len(digits) < 10 else None
    if isinstance(value, float):
        value = int(value) if value.is_integer() else None
    return value if isinstance(value, int) else None
