"""`kvbench calibrate`: TriAttention's statistics of a model."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import FILE, device_option, dtype_option, json_option, option
from agentbench_kv.errors import PrerequisiteError


@click.command()
@option("--model", "Name or folder.", default="micro")
@option("--text", "Plain text, UTF-8; the micro task's text if not given.", FILE, envvar=None)
@dtype_option
@device_option
@json_option
def calibrate(model: str, text: Path | None, dtype: str, device: str, as_json: bool) -> None:
    """Measure MODEL's queries on TEXT and keep the result for every run of triattention."""
    from agentbench_kv.calibrations import MICRO_SOURCE, make_calibration, micro_texts
    from agentbench_kv.cli.documents import print_json
    from agentbench_kv.engines.embedded.model import load_model
    from agentbench_kv.methods.calibration import Calibration

    texts = micro_texts() if text is None else [_read(text)]
    source = MICRO_SOURCE if text is None else text.name
    path = make_calibration(load_model(model, dtype, device), texts, source)
    meta = Calibration.load(path).meta
    if as_json:
        print_json({"path": str(path), **meta})
        return
    click.echo(f"calibrated {model} on {meta['tokens']} tokens of {source}: {path}")


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PrerequisiteError(f"cannot read {path} as UTF-8 text: {error}") from None
