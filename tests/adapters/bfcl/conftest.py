"""A session-aware completions server that replays scripts and checks that prompts only grow."""

import itertools
import json
import re
import threading
from collections import defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote

import pytest

from agentbench_kv.adapters.base import TrialContext
from agentbench_kv.adapters.bfcl.task import MultiTurnBase
from agentbench_kv.environments import python_of
from agentbench_kv.errors import PrerequisiteError
from agentbench_kv.gateway.readers import reader_for
from agentbench_kv.phases.syntax import SYNTAXES


def _call(payload):
    fields = json.loads(payload)
    function = {"name": fields["name"], "arguments": json.dumps(fields["arguments"])}
    return {"id": f"call{abs(hash(payload))}", "type": "function", "function": function}


def _read(text, tools):
    """Return an answer's message as our server does, and whether a call in it is broken."""
    numbers = itertools.count(1)
    reader = reader_for(
        SYNTAXES["hermes"], lambda: f"call_{next(numbers)}", thinking=False, tools=tools
    )
    reader.feed(text)
    reader.finish()
    message = {"role": "assistant", "content": reader.content, "tool_calls": reader.tool_calls}
    return message, reader.unparsable


class ScriptedEndpoint:
    """`scripts[session]` is a list of texts, or a function of (prompt, index)."""

    def __init__(self):
        self.scripts = {}
        self.prompts = defaultdict(list)
        self.bodies = defaultdict(list)
        self.headers = {}
        self.violations = []
        self.busy_answers = 0
        self.failure = None
        self.finish_reason = "stop"
        self.closed = []
        self.release = threading.Event()
        self.release.set()
        self._said = defaultdict(str)
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def close(self):
        self.release.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def answer(self, session, body):
        prompt = body["prompt"]
        with self._lock:
            index = len(self.prompts[session])
            if not prompt.startswith(self._said[session]):
                self.violations.append(session)
            script = self.scripts.get(session, [])
            if callable(script):
                text = script(prompt, index)
            else:
                text = script[index] if index < len(script) else "The script is over."
            self._said[session] = prompt + text
            self.prompts[session].append(prompt)
            self.bodies[session].append(body)
        usage = {"prompt_tokens": len(prompt) // 4, "completion_tokens": len(text) // 4}
        usage["kvbench"] = {"finish_reason": self.finish_reason}
        reason = "length" if self.finish_reason == "context_limit" else self.finish_reason
        message, broken = _read(text, body["tools"])
        if broken:
            usage["kvbench"]["unparsable"] = True
        choice = {"index": 0, "text": text, "message": message, "finish_reason": reason}
        return {"object": "text_completion", "choices": [choice], "usage": usage}

    def answer_chat(self, session, body):
        """Answer from the script, its marked calls taken apart as our gateway does."""
        with self._lock:
            index = len(self.bodies[session])
            script = self.scripts.get(session, [])
            text = script[index] if index < len(script) else "The script is over."
            self.bodies[session].append(body)
        message = {"role": "assistant", "content": text.rpartition("</think>")[2].strip()}
        calls = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text, re.DOTALL)
        if calls:
            message = {"role": "assistant", "content": None, "tool_calls": list(map(_call, calls))}
        message["reasoning_content"] = "hm"
        choice = {"index": 0, "message": message, "finish_reason": self.finish_reason}
        return {"object": "chat.completion", "choices": [choice], "usage": {"prompt_tokens": 1}}

    def _handler(endpoint):  # noqa: N805
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *args):
                pass

            def do_GET(self):
                assert self.path == "/v1/models"
                self._send(200, {"data": [{"id": "scripted"}]})

            def do_DELETE(self):
                session = unquote(self.path.removeprefix("/v1/sessions/"))
                endpoint.closed.append(session)
                self._send(200, {"id": session, "kvbench": {"peak_live": 7}})

            def do_POST(self):
                assert self.path in ("/v1/completions", "/v1/chat/completions")
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                endpoint.headers = dict(self.headers)
                endpoint.release.wait(60)
                if endpoint.failure:
                    return self._send(*endpoint.failure)
                if endpoint.busy_answers > 0:
                    endpoint.busy_answers -= 1
                    return self._send(429, {"error": "busy"}, {"Retry-After": "0.1"})
                session = self.headers["X-KVBench-Session"]
                chat = self.path.endswith("chat/completions")
                answer = endpoint.answer_chat if chat else endpoint.answer
                return self._send(200, answer(session, body))

            def _send(self, status, fields, headers=None):
                data = json.dumps(fields).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                for name, value in (headers or {}).items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(data)

        return Handler


@pytest.fixture
def endpoint():
    server = ScriptedEndpoint()
    yield server
    server.close()


@pytest.fixture(scope="session")
def bfcl_python():
    try:
        return python_of("bfcl")
    except PrerequisiteError:
        pytest.skip("bfcl environment absent: kvbench env create bfcl")


@pytest.fixture(scope="session")
def bfcl(bfcl_python):  # noqa: ARG001
    task = MultiTurnBase()
    yield task
    task.close()


@pytest.fixture
def play(bfcl, endpoint):
    """Play one sample against the scripted endpoint."""

    def run(sample, script, *, task=bfcl, session=None, **context):
        session = session or f"{sample.id}:{len(endpoint.prompts)}"
        endpoint.scripts[session] = script
        return task.run_trial(sample, TrialContext(0, 7, None, endpoint.url, session, **context))

    return run
