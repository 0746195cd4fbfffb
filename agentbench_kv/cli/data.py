"""`kvbench data`: corpora and data sets that users bring."""

from __future__ import annotations

from pathlib import Path

import click

from agentbench_kv.cli.options import PATH, json_option, local, local_flag


@click.group()
def data() -> None:
    """Import corpora for the browsing tasks.

    They live in $KVBENCH_DATA/corpora (default: the folder data in kvbench's home).
    """


@data.command("import-corpus")
@click.argument("source", type=PATH)
@local("--name", "What results call it.", required=True)
@local("--to", "Folder to write.", PATH)
@local_flag("--synthetic", "Made for tests: no benchmark result.")
@local(
    "--encoder",
    "Local sentence-transformers folder: also embed every document, for dense search.",
    PATH,
)
@json_option
def import_corpus(
    source: Path, name: str, to: Path | None, synthetic: bool, encoder: Path | None, as_json: bool
) -> None:
    """Import SOURCE as a corpus: a folder, .jsonl, .jsonl.gz, .parquet, .html or text file.

    \b
    kvbench data import-corpus wikipedia/ --name wikipedia-2024-08
    kvbench run --task frames/test --set corpus=wikipedia-2024-08
    """  # noqa: D301  \b is click's mark for "do not wrap"
    from dataclasses import asdict

    from agentbench_kv.adapters.browser import importing
    from agentbench_kv.adapters.data import data_folder
    from agentbench_kv.cli.documents import print_json
    from agentbench_kv.errors import UsageError

    if not name or name in {".", ".."} or Path(name).name != name:
        raise UsageError(f"--name {name!r}: expected a plain name without slashes")
    folder = to or data_folder() / "corpora" / name
    made = importing.import_corpus(source, folder, name, synthetic=synthetic, encoder=encoder)
    if as_json:
        left_out = {"empty": made.empty, "duplicates": made.duplicates}
        print_json({"folder": str(made.folder), **asdict(made.info), "left_out": left_out})
        return
    click.echo(f"{made.info.label}: {made.info.documents} documents in {made.folder}")
    if made.empty or made.duplicates:
        click.echo(f"left out: {made.empty} without text, {made.duplicates} with a repeated URL")
