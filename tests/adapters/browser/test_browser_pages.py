"""Search, open and find: cursors, links, lines, the cap of a view."""

from __future__ import annotations

import pytest

from agentbench_kv.adapters.browser.browser import (
    TOOLS,
    Browser,
    BrowserError,
    call_tool,
    estimate_tokens,
)
from agentbench_kv.adapters.browser.corpus import Corpus, Document, lines_of


def test_each_call_pushes_one_page(corpus: Corpus) -> None:
    browser = Browser(corpus)
    views = [browser.search("heron"), browser.open(1), browser.find("REEDS"), browser.open(0)]
    assert [view.cursor for view in views] == [0, 1, 2, 3]
    assert [view.text.split(" ")[0] for view in views] == ["[0]", "[1]", "[2]", "[3]"]
    assert "L0: [0] Twin (https://made.test/a)\nL1: The same heron" in views[0].text
    assert views[1].text == (
        "[1] Twin (https://made.test/b)\nviewing lines [0 - 0] of 0\n\n"
        "L0: The same heron stands in the reeds."
    )
    assert "L0: [0] match at L0" in views[2].text
    assert browser.opened == ["https://made.test/b", "https://made.test/b"]


def test_equal_documents_come_in_their_order(corpus: Corpus) -> None:
    assert corpus.index.search("heron reeds", 5) == [0, 2]
    assert corpus.index.search("heron reeds", 1) == [0]
    assert corpus.index.search("", 5) == corpus.index.search("zebra", 5) == []


def test_accents_and_case_do_not_matter_to_search(corpus: Corpus) -> None:
    assert corpus.index.search("CAFE muller", 5) == [4]


def test_two_sessions_see_the_same(corpus: Corpus) -> None:
    def session() -> list[str]:
        browser = Browser(corpus)
        calls = [browser.search("river"), browser.open(0), browser.find("river number 39")]
        return [view.text for view in calls]

    assert session() == session()


def test_a_view_keeps_to_its_cap_and_the_pages_join(corpus: Corpus) -> None:
    browser = Browser(corpus, view_tokens=200)
    line, seen = 0, []
    while line < 400:
        view = browser.open("https://made.test/long", loc=line)
        assert estimate_tokens(view.text) <= 200
        shown = [each for each in view.text.split("\n") if each.startswith("L")]
        seen += shown
        line += len(shown)
    text = corpus.document(3).text
    assert seen == [f"L{n}: {each}" for n, each in enumerate(text.split("\n"))]


def test_another_counter_caps_the_view(corpus: Corpus) -> None:
    view = Browser(corpus, view_tokens=300, count=len).open("https://made.test/long")
    assert (
        len(view.text) <= 300 < len(view.text) + len("\nL9: Paragraph 9 speaks of river number 9.")
    )


def test_lines_are_of_eighty_columns() -> None:
    lines = lines_of("word " * 100 + "\n\n" + "x" * 200)
    assert max(map(len, lines)) == 80
    assert "".join(lines).replace(" ", "") == "word" * 100 + "x" * 200


def test_find_goes_over_line_breaks_and_links_lead_to_the_line(corpus: Corpus) -> None:
    browser = Browser(corpus)
    browser.open("https://made.test/wrapped")
    assert "[0] match at L0" in browser.find("crossing the  border").text
    browser.open("https://made.test/long")
    assert "[0] match at L399" in browser.find("RIVER number 399.").text
    view = browser.open(0)
    assert view.text.endswith("\n\nL399: Paragraph 399 speaks of river number 399.")
    assert "No match." in browser.find("zebra").text


def test_a_name_that_is_a_number_is_opened_where_no_link_has_it(corpus: Corpus) -> None:
    """BrowseComp-Plus names its documents by numbers, which models pass as numbers."""
    del corpus  # skips without the extra
    made = [Document("5412", "5412", "Herons", "A heron."), Document("1", "1", "Otters", "Otter.")]
    browser = Browser(Corpus.from_documents(made, "two", synthetic=True))
    browser.search("otter heron")
    assert "A heron." in browser.open(5412).text
    with pytest.raises(BrowserError, match="no link 77 on that page"):
        browser.open(77, cursor=0)


def test_pages_stay_where_they_were(corpus: Corpus) -> None:
    browser = Browser(corpus)
    browser.search("otter")
    browser.open(0)
    browser.search("heron")
    assert "Otter Lake" in browser.open(0, cursor=0).text
    assert "heron" in browser.open(cursor=2).text
    again = browser.open(cursor=1, loc=2, num_lines=1).text
    assert again.endswith("viewing lines [2 - 2] of 2\n\nL2: A quiet lake.")


@pytest.mark.parametrize("key", ["https://made.test/Otter%20Lake", "otter",
                                 "https://made.test/Otter%20Lake#history"])  # fmt: skip
def test_a_document_opens_by_url_or_id(corpus: Corpus, key: str) -> None:
    assert "A quiet lake." in Browser(corpus).open(key).text


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("open", {}, "no page is open yet; search first"),
        ("find", {"pattern": "x"}, "no page is open yet; search first"),
        ("open", {"id": "https://elsewhere.test/"}, "no document https://elsewhere.test/"),
        ("search", {"query": "  "}, "the query is empty"),
        ("search", {}, "search needs 'query'"),
        ("search", {"query": ["a"]}, "query must be a text"),
        ("search", {"query": "a", "page": 2}, "search takes query, topn, not page"),
        ("open", {"cursor": True}, "cursor must be a number"),
        ("browse", {}, "no tool 'browse'; there are search, open, find"),
    ],
)
def test_wrong_calls_are_answered_in_words(
    corpus: Corpus, name: str, arguments: dict[str, object], message: str
) -> None:
    seen = call_tool(Browser(corpus), name, arguments)
    assert seen.failed
    assert seen.text.startswith(f"Error: {message}")


def test_wrong_places_push_nothing(corpus: Corpus) -> None:
    browser = Browser(corpus)
    browser.search("heron")
    for call in (
        lambda: browser.open(2),
        lambda: browser.open(0, cursor=7),
        lambda: browser.open(0, cursor=-2),
        lambda: browser.open("otter", loc=3),
        lambda: browser.find("heron"),
    ):
        with pytest.raises(BrowserError):
            call()
    assert browser.opened == []
    assert browser.open(0).cursor == 1


def test_models_write_numbers_as_text_and_arguments_as_anything(corpus: Corpus) -> None:
    browser = Browser(corpus)
    call_tool(browser, "search", '{"query": "otter"}')
    seen = call_tool(browser, "open", '{"id": "0", "cursor": 0.0, "loc": null}')
    assert seen.cursor == 1
    assert "Otter Lake" in seen.text
    assert call_tool(browser, "open", "not JSON").text == "Error: the arguments are not JSON"
    assert call_tool(browser, "open", "[1]").text == "Error: the arguments are not a JSON object"


def test_the_schemas_name_what_the_tools_take() -> None:
    functions = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    assert set(functions) == {"search", "open", "find"}
    assert set(functions["open"]["properties"]) == {"id", "cursor", "loc", "num_lines"}


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("", 0),
        ("word", 1),
        ("words", 2),
        ("a b", 2),
        ("1776", 4),
        ("a, b.", 4),
        ("é", 1),
        ("水", 2),
    ],
)
def test_the_estimate_by_hand(text: str, tokens: int) -> None:
    assert estimate_tokens(text) == tokens
