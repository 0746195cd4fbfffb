"""The site in a real browser: Debian's Chromium, driven by Playwright, no network."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from agentbench_kv.results.runs import load_runs
from agentbench_kv.results.site import build_site

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
BROWSER = shutil.which("chromium") or shutil.which("chromium-browser")
if BROWSER is None:
    pytest.skip("no Chromium: apt-get install -y chromium", allow_module_level=True)

FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
)  # fmt: skip
PHONE = {"width": 375, "height": 740}
PAGES = ("index.html", "tasks/micro_recall-1k.html", "runs/agentkv-200.html", "runs/hostile.html")


@pytest.fixture(scope="module")
def site(site_runs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    return build_site(*load_runs([site_runs]), folder).parent


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=BROWSER, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, site):
    """Return a function that opens a page of the site; every fault of any of them fails the test.

    A fault is a request for anything but the page itself, an exception, or an entry on the
    console, which is also where the browser reports what the policy blocked.
    """
    faults, contexts = [], []

    def opened(name, fragment="", **settings):
        context = browser.new_context(**{"color_scheme": "light"} | settings)
        contexts.append(context)
        context.set_default_timeout(60_000)
        page = context.new_page()
        own = (site / name).as_uri()
        page.on("request", lambda r: r.url.split("#")[0] == own or faults.append(r.url))
        page.on("console", lambda message: faults.append(message.text))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("dialog", lambda dialog: faults.append(dialog.message))
        page.goto(own + fragment)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert faults == []


TASK = "tasks/micro_recall-1k.html"


def column(page, key):
    """Return the cells of a column of the list of runs, in the rows that are shown."""
    place = page.locator("#runs thead button").evaluate_all(
        "(all, key) => all.findIndex((button) => button.dataset.key === key)", key
    )
    rows = page.locator("#runs tbody tr[data-order]:visible")
    return rows.evaluate_all("(all, i) => all.map((row) => row.cells[i].dataset.v)", place)


def test_the_list_of_runs_sorts_both_ways(open_page):
    page = open_page(TASK)
    before = list(map(float, column(page, "score")))
    assert sorted(before, reverse=True) != before
    page.get_by_role("button", name="Score").click()
    assert list(map(float, column(page, "score"))) == sorted(before, reverse=True)
    heading = page.locator("th", has=page.locator("button[data-key=score]"))
    assert heading.get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="Score").click()
    assert list(map(float, column(page, "score"))) == sorted(before)
    page.get_by_role("button", name="Method").click()
    assert column(page, "method") == sorted(column(page, "method"))


def test_the_list_of_runs_is_searched(open_page):
    page = open_page(TASK)
    page.get_by_label("Search").fill("agentkv")
    assert column(page, "budget") == ["200", "400"]
    page.get_by_label("Search").fill("agentkv 200")
    assert column(page, "budget") == ["200"]
    assert page.locator("#count").inner_text() == "1 of 6 runs"
    assert page.locator("tr.why:visible").count() == 0
    page.get_by_label("Search").fill("")
    assert page.locator("#count").inner_text() == "6 of 6 runs"
    assert page.locator("tr.why:visible").count() == 1


def test_a_permalink_restores_search_and_order(open_page):
    page = open_page(TASK)
    page.get_by_label("Search").fill("snapkv")
    page.get_by_role("button", name="Live / logical").click()
    other = open_page(TASK, page.evaluate("location.hash"))
    assert other.get_by_label("Search").input_value() == "snapkv"
    assert column(other, "kept") == column(page, "kept") == ["0.58", "0.38"]


def test_the_keyboard_reaches_and_activates_sorting(open_page):
    page = open_page(TASK)
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.key") == "score":
            break
    page.keyboard.press("Enter")
    scores = list(map(float, column(page, "score")))
    assert scores == sorted(scores, reverse=True)


def test_smaller_budgets_of_a_tier_are_shown_on_demand(open_page, tmp_path, site, site_runs):
    runs = tmp_path / "runs"
    shutil.copytree(site_runs, runs)
    for name in ("agentkv-200", "snapkv-200"):
        info = runs / name / "run.json"
        info.write_text(info.read_text().replace('"budget": 200', '"budget": 399'))
        records = runs / name / "samples.jsonl"
        records.write_text(records.read_text().replace('"peak_live":380', '"peak_live":579'))
    build_site(*load_runs([runs]), site / "tiers")
    page = open_page(f"tiers/{TASK}")
    others = page.locator(".tiers tr.other:visible")
    assert others.count() == 0
    page.get_by_label("smaller budgets").check()
    assert others.count() == 2
    assert "not ranked" in others.first.inner_text()


def test_the_chart_draws_every_method_with_its_interval(open_page, site_runs):
    page = open_page("index.html")
    chart = page.locator(f"section:has(h2 a[href='{TASK}']) .chart")
    assert chart.locator(".series.full .band").count() == 1
    assert sorted(chart.locator("text.name").all_text_contents()) == ["agentkv", "full", "snapkv"]
    (run,), _ = load_runs([site_runs / "snapkv-400"])
    score = run.summary.score
    dot = chart.locator("g:has(> circle)", has_text="snapkv at 400: ")
    assert f"[{100 * score.low:.1f}, {100 * score.high:.1f}]" in dot.locator("title").text_content()
    place = "(all) => all.map((each) => each.getBoundingClientRect().y)"
    lines = chart.locator(".grid").evaluate_all(place)
    top, bottom = min(lines), max(lines)
    circle, ends = (dot.locator(kind).bounding_box() for kind in ("circle", "line"))
    share = (bottom - circle["y"] - circle["height"] / 2) / (bottom - top)
    assert share == pytest.approx(score.point, abs=0.02)
    length = ends["height"] / (bottom - top)
    assert length == pytest.approx(score.high - score.low, abs=0.02)


def test_a_phone_sees_method_budget_and_score_without_scrolling(open_page):
    def in_sight(row, *cells):
        for cell in (row.locator("th"), *(row.locator("td").nth(number) for number in cells)):
            box = cell.bounding_box()
            assert 0 <= box["x"] <= box["x"] + box["width"] <= PHONE["width"]

    page = open_page("index.html", viewport=PHONE)
    in_sight(page.locator(".matrix tbody tr", has_text="agentkv").first, 0, 1)
    page = open_page(TASK, viewport=PHONE)
    in_sight(page.locator("#runs tbody tr", has_text="agentkv").first, 0, 1)
    in_sight(page.locator(".tiers tbody tr", has_text="agentkv").first, 0)


@pytest.mark.parametrize("name", PAGES)
def test_a_desktop_cuts_nothing(open_page, name):
    page = open_page(name, viewport={"width": 1280, "height": 800})
    assert page.evaluate("document.documentElement.scrollWidth") <= 1280
    cut = page.locator(".scroll").evaluate_all(
        "(all) => all.filter((each) => each.scrollWidth > each.clientWidth + 1)"
        ".map((each) => each.getAttribute('aria-label'))"
    )
    assert cut == []


@pytest.mark.parametrize("name", ["index.html", "runs/hostile.html"])
def test_hostile_text_does_nothing(open_page, hostile, name):
    page = open_page(name)
    assert "kvbench" in page.title()
    page.locator("details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    text = page.locator("main").inner_text()
    assert hostile[:30] in text
    assert page.locator("main script, main img, main a[href^='javascript:' i]").count() == 0
    assert "owned" not in page.title()


def test_injected_code_would_be_blocked(browser, site, tmp_path):
    """If escaping ever failed, the policy holds: the same page with raw markup runs nothing."""
    html = (site / "runs" / "hostile.html").read_text("utf-8")
    attack = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    target = tmp_path / "attacked.html"
    target.write_text(html.replace("<h2>Figures</h2>", attack), "utf-8")
    context = browser.new_context()
    page = context.new_page()
    blocked = []
    page.on("console", lambda message: blocked.append(message.text))
    page.goto(target.as_uri())
    assert "owned" not in page.title()
    assert any("Content Security Policy" in message for message in blocked)
    context.close()


@pytest.mark.parametrize("name", PAGES)
def test_a_phone_never_scrolls_sideways(open_page, name):
    page = open_page(name, viewport=PHONE)
    page.locator("details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES[:3])
def test_no_accessibility_fault(open_page, name, scheme):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = open_page(name, color_scheme=scheme)
    page.locator("details").evaluate_all("(all) => all.forEach((each) => { each.open = true; })")
    found = axe.Axe().run(page).response
    assert len(found["passes"]) > 10
    faults = [
        (fault["id"], [node["html"][:200] for node in fault["nodes"][:3]])
        for fault in found["violations"]
    ]
    assert faults == []


def test_the_theme_switch_is_remembered(open_page):
    page = open_page("index.html", color_scheme="light")
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    assert page.evaluate(ground) != light
    page.reload()
    assert page.evaluate(ground) != light


@pytest.mark.skipif("KVBENCH_SCREENSHOTS" not in os.environ, reason="KVBENCH_SCREENSHOTS=DIR")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 1280])
def test_screenshots(open_page, scheme, width):
    for name in PAGES:
        page = open_page(name, color_scheme=scheme, viewport={"width": width, "height": 800})
        file = f"{name.replace('/', '-')}-{width}-{scheme}.png"
        page.screenshot(path=Path(os.environ["KVBENCH_SCREENSHOTS"], file), full_page=True)
