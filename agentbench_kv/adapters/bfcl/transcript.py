"""The session's text: it only ever grows, so every prompt extends the one before."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

END = "<|im_end|>"

INSTRUCTIONS = """\
You carry out the user's requests with the tools below. Go on calling tools until \
the current request is done; then answer in plain words, and the user will speak again.

Tools, one JSON description a line:
<tools>
{tools}
</tools>

To use a tool, write one JSON object between call marks:
<tool_call>
{{"name": "the tool's name", "arguments": {{"parameter": "value"}}}}
</tool_call>
Several calls may follow one another. Each result comes back between <tool_response> and \
</tool_response>."""


class Transcript:
    """Text of one session in the chat form with `<|im_start|>` and `<|im_end|>`."""

    def __init__(self, tools: Iterable[Mapping[str, Any]]) -> None:
        lines = (json.dumps(tool, ensure_ascii=False) for tool in tools)
        self._instructions = INSTRUCTIONS.format(tools="\n".join(lines))
        self.text = ""

    def begin(self, system: Iterable[str]) -> None:
        """Write the system message: the benchmark's own, then the tools."""
        joined = "\n\n".join([*map(_safe, system), self._instructions])
        self.text = f"<|im_start|>system\n{joined}{END}\n"

    def add(self, role: str, content: str) -> None:
        self._end_assistant()
        self.text += f"<|im_start|>{role}\n{_safe(content)}{END}\n"

    def prompt(self) -> str:
        """Open the assistant's message and return the whole text."""
        self._end_assistant()
        self.text += "<|im_start|>assistant\n"
        return self.text

    def add_generated(self, raw: str) -> None:
        self.text += raw

    def add_results(self, results: Iterable[str]) -> None:
        """Add the results of the calls as one user message."""
        marked = "\n".join(f"<tool_response>\n{_safe(r)}\n</tool_response>" for r in results)
        self._end_assistant()
        self.text += f"<|im_start|>user\n{marked}{END}\n"

    def _end_assistant(self) -> None:
        if self.text.endswith(END):  # a server that leaves the stop marker in the text
            self.text += "\n"
        elif not self.text.endswith(f"{END}\n"):
            self.text += f"{END}\n"


def _safe(content: str) -> str:
    # Text that a tool returns must not be able to open or close a message, and must be encodable.
    plain = content.encode("utf-8", "replace").decode("utf-8")
    return plain.replace("<|im_", "< |im_")
