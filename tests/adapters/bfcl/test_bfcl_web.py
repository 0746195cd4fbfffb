"""Web search: corpus, recording, live service, and what each is called."""

import hashlib
import importlib.util
import json

import httpx
import pytest

from agentbench_kv.adapters.base import TrialContext
from agentbench_kv.adapters.bfcl import web as web_live
from agentbench_kv.adapters.bfcl import web as web_task
from agentbench_kv.adapters.bfcl.web import (
    LiveWeb,
    Recorder,
    WebSearchBase,
    WebSearchNoSnippet,
    WebService,
)
from agentbench_kv.adapters.bfcl.worker.samples import search_script
from agentbench_kv.adapters.bfcl.worker.web import (
    RecordedWeb,
    ServiceWeb,
    WebSearchAPI,
    read_corpus,
    recording_key,
    synthetic_corpus,
)
from agentbench_kv.errors import PrerequisiteError, UsageError

engine = pytest.mark.engine
FOUND = [{"title": f"t{i}", "href": f"https://x.org/{i}", "body": f"b{i}"} for i in range(3)]


class FakeWeb:
    def __init__(self):
        self.asked = []

    def search(self, keywords, region):
        self.asked.append((keywords, region))
        return FOUND

    def fetch(self, url, mode):
        self.asked.append((url, mode))
        return {"content": f"page of {url}, ü"}


def live(answer, monkeypatch, **options):
    address = [(2, 1, 6, "", ("93.184.216.34", 443))]
    monkeypatch.setattr(web_live.socket, "getaddrinfo", lambda *_, **__: address)
    return LiveWeb("the-key", httpx.MockTransport(answer), **options)


def test_search_sends_the_users_key_and_keeps_three_fields(monkeypatch):
    def answer(request):
        assert dict(request.url.params) == {
            "engine": "duckduckgo", "q": "tea", "kl": "wt-wt", "api_key": "the-key",
        }  # fmt: skip
        row = {"title": "T", "link": "https://x.org", "snippet": "S", "position": 1}
        return httpx.Response(200, json={"organic_results": [row, {"title": "no link"}]})

    found = live(answer, monkeypatch).search("tea", "wt-wt")
    assert found[0] == {"title": "T", "href": "https://x.org", "body": "S"}
    assert found[1] == {"title": "no link", "href": "", "body": ""}


def test_too_many_requests_are_waited_for_and_not_for_ever(monkeypatch):
    answers = [httpx.Response(429, json={}), httpx.Response(200, json={"error": "429 slow down"})]
    pauses = []

    def answer(_request):
        return answers.pop(0) if answers else httpx.Response(200, json={"organic_results": []})

    assert live(answer, monkeypatch, sleep=pauses.append).search("q", "r") == []
    assert pauses == [2.0, 4.0]
    pauses.clear()
    always = live(lambda _: httpx.Response(429, json={}), monkeypatch, sleep=pauses.append)
    assert "error" in always.search("q", "r")
    assert len(pauses) == 7


def test_errors_never_show_the_key(monkeypatch):
    def answer(request):
        raise httpx.ConnectError(f"cannot reach {request.url}")

    found = live(answer, monkeypatch).search("q", "r")
    assert found == {"error": "the search failed: ConnectError"}


def test_pages_raw_and_failing(monkeypatch):
    def answer(request):
        return httpx.Response(404 if request.url.path == "/no" else 200, text="<b>Hi</b>")

    web = live(answer, monkeypatch)
    assert web.fetch("https://x.org/", "raw") == {"content": "<b>Hi</b>"}
    assert "404" in web.fetch("https://x.org/no", "raw")["error"]


@pytest.mark.parametrize("address", ["127.0.0.1", "10.0.0.8", "169.254.169.254", "::1"])
def test_addresses_inside_are_refused_also_after_a_redirect(monkeypatch, address):
    def resolve(host, *_, **__):
        inside = host != "x.org"
        return [(2, 1, 6, "", (address if inside else "93.184.216.34", 443))]

    def answer(request):
        assert request.url.host == "x.org"
        return httpx.Response(302, headers={"location": "http://inside.example/"})

    web = LiveWeb("k", httpx.MockTransport(answer))
    monkeypatch.setattr(web_live.socket, "getaddrinfo", resolve)
    assert "not on the public net" in web.fetch("http://inside.example/", "raw")["error"]
    assert "not on the public net" in web.fetch("http://x.org/", "raw")["error"]


def test_what_is_recorded_is_not_asked_again_and_can_be_replayed(tmp_path):
    file, web = tmp_path / "deep" / "web.jsonl", FakeWeb()
    recorder = Recorder(web, file)
    for _ in range(2):
        assert recorder.search("tea", "wt-wt") == FOUND
        assert recorder.fetch("https://x.org", "raw")["content"].endswith("ü")
    assert len(web.asked) == 2
    Recorder(web, file).search("tea", "wt-wt")
    assert len(web.asked) == 2
    with file.open("a") as stream:
        stream.write('{"key": "torn')
    replayed = RecordedWeb(file)
    assert replayed.search("tea", "wt-wt") == FOUND
    assert replayed.fetch("https://x.org", "raw")["content"].endswith("ü")
    assert replayed.search("coffee", "wt-wt") == {"error": "coffee: not in the recording"}


def test_the_service_answers_only_with_the_token():
    service = WebService(FakeWeb())
    try:
        address = service.address()
        web = ServiceWeb(**address)
        assert web.search("tea", "wt-wt") == FOUND
        assert web.fetch("https://x.org", "raw")["content"].endswith("ü")
        with pytest.raises(ConnectionError, match="403"):
            ServiceWeb(address["port"], "another").search("tea", "wt-wt")
        url = f"http://127.0.0.1:{address['port']}/"
        for body in (b"[]", b"nonsense", json.dumps({"token": address["token"]}).encode()):
            assert httpx.post(url, content=body).status_code == 400
    finally:
        service.close()


def test_the_tools_hide_snippets_and_refuse_what_the_original_refuses():
    class Web:
        def search(self, _keywords, _region):
            return FOUND

        def fetch(self, url, _mode):
            return {"content": url}

    tools = type("Tools", (WebSearchAPI,), {"web": Web()})()
    assert tools.search_engine_query("tea", max_results=None) == FOUND
    assert tools.search_engine_query("tea", max_results=2) == FOUND[:2]
    assert tools.search_engine_query("tea", max_results=-1) == []
    tools._load_scenario({"show_snippet": False})
    assert tools.search_engine_query("tea", 1) == [{"title": "t0", "href": "https://x.org/0"}]
    assert tools.fetch_url_content("https://x.org")["content"] == "https://x.org"
    assert "Unsupported mode" in tools.fetch_url_content("https://x.org", "pdf")["error"]
    with pytest.raises(ValueError, match="Invalid URL"):
        tools.fetch_url_content("file:///etc/passwd")


def test_keys_of_a_recording_tell_searches_from_pages():
    questions = [("search", "a", "b"), ("search", "b", "a"), ("fetch", "a", "b")]
    assert len({recording_key(*each) for each in questions}) == 3
    assert recording_key("search", "thé", "b") == '["search", "thé", "b"]'


def test_a_corpus_folder(tmp_path):
    line = json.dumps({"url": "https://x.org#part", "text": "Tea grows here"})
    (tmp_path / "a.jsonl").write_text(line + "\n")
    (page,) = read_corpus(tmp_path)
    assert (page.url, page.title, page.text) == ("https://x.org#part", "", "Tea grows here")


def test_an_imported_corpus_goes_by_its_name(monkeypatch, tmp_path):
    folder = tmp_path / "corpora" / "tea"
    folder.mkdir(parents=True)
    (folder / "catalog.jsonl").write_text("{}\n")
    page = json.dumps({"url": "https://x.org", "title": "T", "text": "Tea"})
    (folder / "documents.jsonl").write_text(page + "\n")
    monkeypatch.setenv("KVBENCH_DATA", str(tmp_path))
    task = WebSearchBase(corpus="tea")
    assert task._worker_config() == {"web": {"kind": "corpus", "path": str(folder)}}
    assert task._web_sha256() == hashlib.sha256((page + "\n").encode()).hexdigest()
    assert [each.title for each in read_corpus(folder)] == ["T"]


def test_a_synthetic_page_says_its_hops_answer():
    hop = {"source": "https://x.org", "subquestion": "Which tea?", "answer": "Da Hong Pao"}
    (page,) = synthetic_corpus([{"source": [hop]}])
    assert page.text == "Which tea?: Da Hong Pao."


def test_scripts_keep_text_outside_ascii():
    truth = {"ground_truth": ["Büdenbender"], "source": []}
    assert "Büdenbender" in search_script("gold", truth)[-1]
    assert "Büdenbender" not in search_script("corrupt", truth)[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"web": "replay"},
        {"recording": "f"},
        {"corpus": "synthetic", "web": "record", "recording": "f"},
        {"web": "elsewhere"},
    ],
)
def test_settings_that_contradict_each_other(settings):
    with pytest.raises(UsageError):
        WebSearchBase.create(settings)


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({}, "live"),
        ({"web": "record", "recording": "a/f.jsonl"}, "record to f.jsonl"),
        (
            {"web": "replay", "recording": "a/f.jsonl"},
            "replay of f.jsonl (not BFCL web_search)",
        ),
        ({"corpus": "some/wiki"}, "corpus wiki (not BFCL web_search)"),
        ({"corpus": "synthetic"}, "synthetic corpus (not BFCL web_search)"),
    ],
)
def test_every_record_names_the_web(settings, name):
    assert WebSearchBase.create(settings)._about_trial()["web"] == name


def test_missing_key_packages_recording_and_corpus(monkeypatch, tmp_path):
    monkeypatch.delenv("SERPAPI_API_KEY", raising=False)
    with pytest.raises(PrerequisiteError, match="SERPAPI_API_KEY"):
        WebSearchBase()._worker_config()
    monkeypatch.setenv("SERPAPI_API_KEY", "k")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(PrerequisiteError, match="pip install"):
        WebSearchBase()._worker_config()
    absent = str(tmp_path / "none.jsonl")
    with pytest.raises(PrerequisiteError, match="web=record"):
        WebSearchBase(web="replay", recording=absent)._worker_config()
    with pytest.raises(PrerequisiteError, match="jsonl"):
        WebSearchBase(corpus=str(tmp_path))._worker_config()


@engine
def test_a_corpus_of_another_form_is_a_users_error(bfcl_python, tmp_path):  # noqa: ARG001
    (tmp_path / "a.jsonl").write_text('{"text": "no address"}\n')
    task = WebSearchBase(corpus=str(tmp_path))
    try:
        with pytest.raises(PrerequisiteError, match=r"did not answer.*url"):
            task.samples(1, 0)
    finally:
        task.close()


@pytest.fixture(scope="module")
def synthetic(bfcl_python):  # noqa: ARG001
    task = WebSearchNoSnippet(corpus="synthetic")
    yield task
    task.close()


@engine
@pytest.mark.parametrize(("agent", "score"), [("gold", 1.0), ("corrupt", 0.0), ("null", 0.0)])
def test_scripted_agents_over_the_synthetic_corpus(synthetic, endpoint, play, agent, score):
    samples = synthetic.samples(None, 0)
    assert len(samples) == 100
    outcomes = [play(s, synthetic.script(s, agent), task=synthetic) for s in samples[::20]]
    assert [(o.status, o.score) for o in outcomes] == [("scored", score)] * 5
    assert endpoint.violations == []
    results = [r for o in outcomes for step in o.transcript["steps"] for r in step["results"]]
    assert not [r for r in results if r.startswith("Error during execution")]
    assert "'body'" not in "".join(results)


@engine
def test_an_agent_that_never_answers(synthetic, play):
    sample = synthetic.samples(1, 0)[0]
    query = synthetic.script(sample, "gold")[0]
    outcome = play(sample, lambda _prompt, _index: query, task=synthetic)
    assert (outcome.status, outcome.score) == ("turn_limit", None)
    assert outcome.metrics["steps"] == 21


@engine
def test_record_then_replay(monkeypatch, bfcl_python, endpoint, tmp_path):  # noqa: ARG001
    web, file = FakeWeb(), tmp_path / "web.jsonl"
    monkeypatch.setattr(web_task.LiveWeb, "with_users_key", lambda: web)
    results = []
    for mode in ("record", "replay"):
        task = WebSearchBase(web=mode, recording=str(file))
        try:
            sample = task.samples(1, 0)[0]
            endpoint.scripts[mode] = task.script(sample, "gold")
            context = TrialContext(0, 0, None, endpoint.url, mode)
            outcome = task.run_trial(sample, context)
            assert (outcome.status, outcome.score) == ("scored", 1.0), outcome.error
            results.append([step["results"] for step in outcome.transcript["steps"]])
        finally:
            task.close()
    assert results[0] == results[1]
    assert len(web.asked) == 6
    assert "'body': 'b0'" in results[0][0][0]
