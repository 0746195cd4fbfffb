"""The example in the documentation runs."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "analysis.md"


def test_the_python_example(capture, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    capture(800, q_heads=2, kv_heads=1, head_dim=4, runs=40).save(Path("in.safetensors"))
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    exec(compile(code, str(PAGE), "exec"), {})
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split()[0]) for line in lines] == list(range(120, 136))
