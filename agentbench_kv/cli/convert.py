"""`kvbench convert`: a Hugging Face model folder as a GGUF file for the llamacpp engine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from agentbench_kv.cli.options import FILE, json_option, print_json


@click.command()
@click.argument("folder")
@click.argument("out", type=FILE)
@json_option
def convert(folder: str, out: Path, as_json: bool) -> None:
    """Write the model in FOLDER (or the shipped `micro`) to the GGUF file OUT, as float32.

    For Qwen2, Qwen3, Llama and Mistral models small enough to check to the bit; large ones are
    better converted and quantised with llama.cpp's own tools. Without the package gguf here, the
    environment llamacpp converts.
    """
    from agentbench_kv.engines.core.gguf_header import read_metadata
    from agentbench_kv.engines.embedded.model import model_path
    from agentbench_kv.engines.llamacpp.models import model_shape

    _convert(model_path(folder), out)
    shape = model_shape(read_metadata(out))
    size = out.stat().st_size
    if as_json:
        print_json({"path": str(out), "bytes": size, "architecture": shape.architecture})
        return
    click.echo(f"{out}: {shape.architecture}, {shape.layers} layers, {size / 1e6:.1f} MB")


def _convert(folder: Path, out: Path) -> None:
    if find_spec("gguf") is not None:
        from agentbench_kv.engines.llamacpp.gguf import convert as convert_here

        convert_here(folder, out)
        return
    from agentbench_kv.engines.llamacpp.models import convert_elsewhere
    from agentbench_kv.environments import python_of

    convert_elsewhere(python_of("llamacpp"), folder, out)
