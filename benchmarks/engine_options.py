"""Write down whether an engine's server knows what we write on its command line, by reading it.

    python benchmarks/engine_options.py vllm 0.33.0 source

`source` is the folder that its wheel was unpacked in (`engine_symbols.py` says how). The command
lines are those of CPUs and GPUs, as shipped and with the plug-in, with every precision of cached
rows and with offload, which no test can start here. `tests/engines/serving/options` gets the names
and the file that has each: an option of the argument parser, a value, or a variable that it reads.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Iterable, Iterator
from itertools import chain, product
from pathlib import Path
from tempfile import TemporaryDirectory

from engine_symbols import ROOT, TESTED, class_of

from agentbench_kv.engines.base import EngineOptions
from agentbench_kv.engines.serving.model_facts import ModelFacts
from agentbench_kv.engines.serving.wire import EngineWire
from agentbench_kv.engines.sglang.engine import SglangEngine, SglangEngineWire
from agentbench_kv.engines.sglang.plugin.versions import VERSIONS
from agentbench_kv.engines.vllm.engine import VllmEngine, VllmEngineWire
from agentbench_kv.registry import make_method

FACTS = ROOT / "tests" / "engines" / "serving" / "options"
# Files that have an engine's options, their values and its variables, the likeliest first.
_READ = {
    "vllm": ("engine/arg_utils.py", "entrypoints/**/cli_args.py", "config/*.py", "envs.py"),
    "sglang": (
        "srt/server_args.py", "srt/arg_groups/**/*.py", "srt/environ.py", "srt/utils/common.py",
    ),
}  # fmt: skip
_ENGINES = {"vllm": (VllmEngine, VllmEngineWire), "sglang": (SglangEngine, SglangEngineWire)}
_VALUES = ("--kv-cache-dtype", "--kv-offloading-backend", "--attention-backend")
_MODEL = ModelFacts("qwen3", 2, 4, 2, 32, 4096, (1,))


def facts_file(engine: str, version: str) -> Path:
    return FACTS / f"{engine}-{version}.json"


def written(engine: str, version: str) -> set[str]:
    """Return the options, some of their values and the variables that we start a server with."""
    kind, wire_class = _ENGINES[engine]
    found: set[str] = set()
    for gpu, stock in product((False, True), repeat=2):
        methods = ["full" if stock else "full-constrained", *["full@offload"] * (gpu and stock)]
        for method, kv_dtype in product(methods, ("", *kind.kv_dtypes)):
            asked = EngineOptions(
                "micro", make_method(method, None), kv_dtype=kv_dtype, max_live_tokens=9000,
                device="cuda:1" if gpu else "cpu",
            )  # fmt: skip
            with TemporaryDirectory() as folder:
                here = Path(folder)
                wire = wire_class(asked, _MODEL, Path(sys.executable), here, here, gpu, stock)
                found |= _words(engine, version, wire)
                wire.close()
    return found


def _words(engine: str, version: str, wire: EngineWire) -> set[str]:
    launch = wire.launch()
    words = launch.command
    if engine == "sglang":
        (own,) = [each for each in VERSIONS if type(each).__name__ == class_of(version)]
        words = own.arguments(words)
    pairs = zip(words, [*words[1:], ""], strict=True)
    options = {f"{word} {value}" if word in _VALUES else word for word, value in pairs
               if word.startswith("--")}  # fmt: skip
    return options | {name for name in launch.environment if name.startswith(engine.upper())}


def known(engine: str, source: Path) -> dict[str, str]:
    """Return the names that an engine's files have, as fields or in quotes, and the first file."""
    root = source / engine
    files = chain.from_iterable(sorted(root.glob(pattern)) for pattern in _READ[engine])
    found: dict[str, str] = {}
    for file in files:
        for name in _names(ast.parse(file.read_text(encoding="utf-8"))):
            found.setdefault(name, str(file.relative_to(source)))
    return found


def _names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.Assign):
            yield from (each.id for each in node.targets if isinstance(each, ast.Name))


def facts(names: Iterable[str], there: dict[str, str]) -> dict[str, str]:
    """Return the file that has each name; what no file has is left out."""
    found = {name: [there[each] for each in _spellings(name) if each in there] for name in names}
    return {name: places[0] for name, places in sorted(found.items()) if places}


def _spellings(name: str) -> list[str]:
    """Return how sources may have a name: a field, a switch's positive, a literal."""
    if not name.startswith("--"):
        return [name]
    option, _, value = name.partition(" ")
    if value:
        return [value]
    field = option.removeprefix("--").replace("-", "_")
    return [field, option, re.sub("^no_", "", field)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", choices=sorted(TESTED))
    parser.add_argument("version")
    parser.add_argument("source", type=Path, help="folder that the wheel was unpacked in")
    given = parser.parse_args()
    names = written(given.engine, given.version)
    found = facts(names, known(given.engine, given.source))
    file = facts_file(given.engine, given.version)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    missing = sorted(names - found.keys())
    print("\n".join(f"{name}: nothing has it" for name in missing) or f"{file.name}: all there")


if __name__ == "__main__":
    main()
