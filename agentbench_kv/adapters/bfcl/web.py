"""BFCL v4 web search, over the live web, a recording of it, or a local corpus.

The live web is asked in the harness's own process, which holds the user's key: workers ask it over
loopback with a token. A `Recorder` keeps every answer, so that other methods can see the same web
and a run can be replayed.
"""

from __future__ import annotations

import importlib
import importlib.util
import ipaddress
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx

from agentbench_kv.adapters.bfcl.task import BfclTask
from agentbench_kv.adapters.bfcl.worker.web import (
    SYNTHETIC,
    Web,
    corpus_files,
    read_recording,
    recording_key,
)
from agentbench_kv.adapters.data import data_folder, file_sha256
from agentbench_kv.adapters.worker import WorkerPool
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric

KEY_VARIABLE = "SERPAPI_API_KEY"
_SEARCH_URL = "https://serpapi.com/search.json"
_SEARCH_RESULTS = 100
_PAGE_S = 20.0
_PAUSES_S = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 120.0)
_LONGEST_QUESTION = 1 << 20
_NOT_OFFICIAL = "not BFCL web_search"
_AGENT = "Mozilla/5.0 (X11; Linux x86_64) agentbench-kv"


class LiveWeb:
    """DuckDuckGo through SerpAPI, and the pages themselves.

    The user's key goes to SerpAPI and nowhere else. `sleep` waits between attempts when the search
    engine says that there were too many; it and `transport` are replaced in tests.
    """

    def __init__(
        self,
        key: str,
        transport: httpx.BaseTransport | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._key = key
        self._sleep = sleep
        self._searching = httpx.Client(timeout=_PAGE_S, transport=transport)
        self._reading = httpx.Client(
            timeout=_PAGE_S,
            transport=transport,
            follow_redirects=True,
            headers={"User-Agent": _AGENT, "Accept-Language": "en-US,en;q=0.9"},
            event_hooks={"request": [_refuse_private]},
        )

    @classmethod
    def with_users_key(cls) -> LiveWeb:
        """Take the key from the environment; PrerequisiteError without it or what reads pages."""
        key = os.environ.get(KEY_VARIABLE)
        if not key:
            raise PrerequisiteError(
                f"web search over the live web needs a SerpAPI key in {KEY_VARIABLE}; without one "
                "use --set web=replay --set recording=FILE, or --set corpus=DIR"
            )
        if not all(map(importlib.util.find_spec, ("html2text", "bs4"))):
            raise PrerequisiteError(
                "reading live pages needs html2text and beautifulsoup4: "
                "pip install 'agentbench-kv[bfcl-web]'"
            )
        return cls(key)

    def search(self, keywords: str, region: str) -> Any:
        """Ask the search engine, patiently if it is asked too often."""
        wanted = {"engine": "duckduckgo", "q": keywords, "kl": region, "api_key": self._key}
        pauses = iter(_PAUSES_S)
        while True:
            try:
                answer = self._searching.get(_SEARCH_URL, params=wanted)
                found = answer.json()
            except (httpx.HTTPError, ValueError) as error:
                # The message of an HTTP error may hold the URL, and the URL holds the key.
                return {"error": f"the search failed: {type(error).__name__}"}
            limited = answer.status_code == 429 or "429" in str(found.get("error", ""))
            pause = next(pauses, None)
            if not limited or pause is None:
                return _results(found)
            self._sleep(pause)

    def fetch(self, url: str, mode: str) -> dict[str, str]:
        """Read a page; what goes wrong is told to the model, as the original does."""
        try:
            response = self._reading.get(url)
            response.raise_for_status()
            return {"content": _converted(response.text, mode)}
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, OSError) as error:
            return {"error": f"An error occurred while fetching {url}: {error}"}


class Recorder:
    """Asks another web only for what the recording does not hold yet, and appends the answer."""

    def __init__(self, web: Web, file: Path) -> None:
        self._web, self._file = web, file
        self._known = read_recording(file)
        self._lock = threading.Lock()
        file.parent.mkdir(parents=True, exist_ok=True)

    def search(self, keywords: str, region: str) -> Any:
        return self._answer(self._web.search, "search", keywords, region)

    def fetch(self, url: str, mode: str) -> dict[str, str]:
        return dict(self._answer(self._web.fetch, "fetch", url, mode))

    def _answer(self, ask: Callable[[str, str], Any], kind: str, *question: str) -> Any:
        key = recording_key(kind, *question)
        with self._lock:
            if key in self._known:
                return self._known[key]
        result = ask(*question)
        with self._lock:
            # Another thread may have been faster; then its answer is the recorded one.
            if key not in self._known:
                self._known[key] = result
                with self._file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps({"key": key, "result": result}) + "\n")
            return self._known[key]


class WebService:
    """Answers workers on a loopback port until it is closed."""

    def __init__(self, web: Web) -> None:
        self._token = secrets.token_urlsafe(16)
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(web, self._token))
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True)
        self._thread.start()

    def address(self) -> dict[str, Any]:
        return {"port": self._server.server_address[1], "token": self._token}

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _handler(web: Web, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: Any) -> None:
            pass

        def do_POST(self) -> None:
            try:
                length = min(int(self.headers["Content-Length"]), _LONGEST_QUESTION)
                question = json.loads(self.rfile.read(length))
                if not secrets.compare_digest(str(question.get("token")).encode(), token.encode()):
                    status, result = 403, None
                elif question["op"] == "search":
                    status, result = 200, web.search(question["keywords"], question["region"])
                else:
                    status, result = 200, web.fetch(question["url"], question["mode"])
            except (ValueError, KeyError, TypeError, AttributeError):
                status, result = 400, None
            body = json.dumps(result).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    return Handler


def _results(found: dict[str, Any]) -> Any:
    if "organic_results" not in found:
        return {"error": "the search engine returned no results; try again later"}
    names = {"title": "title", "href": "link", "body": "snippet"}
    rows = found["organic_results"][:_SEARCH_RESULTS]
    return [{ours: row.get(theirs, "") for ours, theirs in names.items()} for row in rows]


def _converted(page: str, mode: str) -> str:
    if mode == "markdown":
        converter: Any = importlib.import_module("html2text")
        return str(converter.HTML2Text().handle(page))
    if mode == "truncate":
        soup = importlib.import_module("bs4").BeautifulSoup(page, "html.parser")
        for hidden in soup(["script", "style"]):
            hidden.extract()
        return str(soup.get_text(separator="\n", strip=True))
    return page


def _refuse_private(request: httpx.Request) -> None:
    """Refuse hosts not on the public net, also after a redirect: a model chooses where we go."""
    found = socket.getaddrinfo(request.url.host, request.url.port or 443, type=socket.SOCK_STREAM)
    for *_, address in found:
        if not ipaddress.ip_address(str(address[0]).partition("%")[0]).is_global:
            raise ValueError(f"{request.url.host} is not on the public net")


@dataclass(kw_only=True)
class WebSearchTask(BfclTask):
    """Questions of several hops with a search engine and a page reader.

    Only the live web (SerpAPI with the user's key, and the pages themselves) is BFCL's web search.
    Whatever else answers is named in every record.
    """

    # `record` keeps every answer in `recording` and does not ask again for what is there.
    web: str = param("live", "where answers come from", choices=("live", "record", "replay"))
    recording: str = param("", "file for web=record and web=replay")
    # Pages are `url`, `title`, `text`; `synthetic` ones are made from the ground truth, to check
    # the plumbing.
    corpus: str = param("", "imported corpus or folder of pages instead of the web, or synthetic")
    _service: WebService | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.corpus and (self.web != "live" or self.recording):
            raise UsageError("corpus= takes the web's place; leave out web= and recording=")
        if (self.web != "live") != bool(self.recording):
            raise UsageError("recording=FILE goes with web=record or web=replay, and they with it")

    def close(self) -> None:
        super().close()
        service, self._service = self._service, None
        if service is not None:
            service.close()

    def provenance(self) -> dict[str, Any]:
        return {**super().provenance(), "web": self._web_name(), "web_sha256": self._web_sha256()}

    def _about_trial(self) -> dict[str, Metric]:
        return {**super()._about_trial(), "web": self._web_name()}

    def _web_name(self) -> str:
        """Name the web for people; anything but the live one says that it is not the benchmark."""
        if self.corpus == SYNTHETIC:
            return f"synthetic corpus ({_NOT_OFFICIAL})"
        if self.corpus:
            return f"corpus {Path(self.corpus).name} ({_NOT_OFFICIAL})"
        if self.web == "replay":
            return f"replay of {Path(self.recording).name} ({_NOT_OFFICIAL})"
        return self.web if self.web == "live" else f"record to {Path(self.recording).name}"

    def _web_sha256(self) -> str | None:
        """Hash what answers, if it stays the same: a recording that is replayed, or a corpus."""
        if self.web == "replay":
            return file_sha256(Path(self.recording))
        if self.corpus and self.corpus != SYNTHETIC:
            return ",".join(map(file_sha256, corpus_files(_folder(self.corpus))))
        return None

    def _worker_config(self) -> dict[str, Any]:
        if self.corpus:
            return {"web": {"kind": "corpus", "path": self._corpus()}}
        file = Path(self.recording).absolute()
        if self.web == "replay":
            if not file.is_file():
                raise PrerequisiteError(f"no recording {file}; make one with --set web=record")
            return {"web": {"kind": "recording", "path": str(file)}}
        live = LiveWeb.with_users_key()
        self._service = WebService(Recorder(live, file) if self.web == "record" else live)
        return {"web": {"kind": "service", **self._service.address()}}

    def _corpus(self) -> str:
        if self.corpus == SYNTHETIC:
            return SYNTHETIC
        folder = _folder(self.corpus)
        if not corpus_files(folder):
            raise PrerequisiteError(
                f"corpus={self.corpus}: neither an imported corpus (kvbench data import-corpus) "
                "nor a folder with *.jsonl pages, a line each with url, title and text"
            )
        return str(folder)

    def _start(self) -> WorkerPool:
        if self._service is not None:
            self._service.close()
        return super()._start()


class WebSearchBase(WebSearchTask):
    """`web_search_base`: results show a piece of the page."""

    name = "bfcl/web_search_base"
    summary = "BFCL v4 web search with snippets: 100 questions of several hops"
    categories = ("web_search_base",)


class WebSearchNoSnippet(WebSearchTask):
    """`web_search_no_snippet`: results are titles and addresses."""

    name = "bfcl/web_search_no_snippet"
    summary = "BFCL v4 web search without snippets: 100 questions of several hops"
    categories = ("web_search_no_snippet",)


def _folder(wanted: str) -> Path:
    """Return a corpus's folder: a path, or the name of an imported one."""
    imported = data_folder() / "corpora" / wanted
    return imported if imported.is_dir() and not Path(wanted).is_dir() else Path(wanted).absolute()
