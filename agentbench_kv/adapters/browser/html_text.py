"""The readable text of an HTML page: enough for encyclopedia articles, nothing is executed."""

from __future__ import annotations

import re
from html.parser import HTMLParser

_HIDDEN = frozenset({"script", "style", "noscript", "template", "svg", "math", "nav", "footer"})
_BLOCKS = frozenset({
    "address", "article", "aside", "blockquote", "br", "caption", "dd", "div", "dl", "dt",
    "figcaption", "figure", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main",
    "ol", "p", "pre", "section", "table", "tbody", "thead", "tr", "ul",
})  # fmt: skip
_BLANK_LINES = re.compile(r"\n\s*\n+")


class Article(HTMLParser):
    """Collects title, canonical URL and text while HTML is fed to it."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title = ""
        self.url = ""
        self._parts: list[str] = []
        self._hidden = 0
        self._in_title = False

    @property
    def text(self) -> str:
        """The text so far: a line a block, table cells separated by bars."""
        lines = (" ".join(line.split()) for line in "".join(self._parts).split("\n"))
        return _BLANK_LINES.sub("\n\n", "\n".join(lines)).strip()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        fields = dict(attrs)
        if tag == "link" and fields.get("rel") == "canonical":
            self.url = fields.get("href") or ""
        self._hidden += tag in _HIDDEN
        # Drawings have titles too.
        self._in_title = self._in_title or (tag == "title" and not self._hidden)
        if tag in _BLOCKS:
            self._parts.append("\n")
        elif tag in {"td", "th"}:
            self._parts.append(" | ")

    def handle_endtag(self, tag: str) -> None:
        self._hidden = max(0, self._hidden - (tag in _HIDDEN))
        self._in_title = self._in_title and tag != "title"
        if tag in _BLOCKS:
            self._parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title += data
        elif not self._hidden:
            # Line breaks of the source mean nothing.
            self._parts.append(re.sub(r"\s+", " ", data))


def article(html: str) -> Article:
    """Read a whole HTML page."""
    parsed = Article()
    parsed.feed(html)
    parsed.close()
    parsed.title = " ".join(parsed.title.split())
    return parsed
