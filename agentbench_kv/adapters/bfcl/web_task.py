"""BFCL v4 web search, over the live web, a recording of it, or a local corpus."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentbench_kv.adapters.bfcl.task import BfclTask
from agentbench_kv.adapters.bfcl.web_live import LiveWeb, Recorder, WebService
from agentbench_kv.adapters.bfcl.web_worker import SYNTHETIC, corpus_files
from agentbench_kv.adapters.data import data_folder, file_sha256
from agentbench_kv.adapters.worker import WorkerPool
from agentbench_kv.errors import PrerequisiteError, UsageError
from agentbench_kv.params import param
from agentbench_kv.results.records import Metric

_NOT_OFFICIAL = "not BFCL web_search"


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
