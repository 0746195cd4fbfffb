"""Write down whether an engine has what our plug-in uses of it, by reading both.

    pip download --no-deps vllm==0.33.0 && unzip -q vllm-0.33.0-*.whl '*.py' -d source
    python benchmarks/engine_symbols.py vllm 0.33.0 source

Nothing of the engine is imported or kept: `tests/engines/serving/symbols` gets names alone. Tests
compare them with what the plug-in uses, on any machine; whoever changes what it uses, or adds a
version, runs this again for each.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from engine_objects import objects_of

from agentbench_kv.engines.sglang.plugin.hooks import TESTED as SGLANG
from agentbench_kv.engines.sglang.plugin.versions import VERSIONS
from agentbench_kv.engines.vllm.plugin.launch import SYMBOLS
from agentbench_kv.engines.vllm.plugin.launch import TESTED as VLLM

ROOT = Path(__file__).parents[1]
FACTS = ROOT / "tests" / "engines" / "serving" / "symbols"
TESTED = {"vllm": VLLM, "sglang": SGLANG}

# Path -> names of parameters or fields; None for what has none, or none that we ask for.
Facts = Mapping[str, list[str] | None]
Words = Mapping[str, frozenset[str]]


def facts_file(engine: str, version: str) -> Path:
    return FACTS / f"{engine}-{version}.json"


def listed(engine: str, version: str) -> Mapping[str, tuple[str, ...]]:
    """Return what the plug-in itself compares with the engine when it starts."""
    if engine == "vllm":
        return SYMBOLS
    (here,) = [each for each in VERSIONS if type(each).__name__ == class_of(version)]
    return here.targets


def class_of(version: str) -> str:
    """Return the name of the class that has what is peculiar to a version of SGLang."""
    return f"Sglang{version.replace('.', '')}"


def wanted(engine: str, version: str) -> Words:
    """Return all that the plug-in uses, with the parameters or fields it needs."""
    found = {path: frozenset(words) for path, words in listed(engine, version).items()}
    for tree in map(_parsed, _files(engine)):
        for path, words in uses(
            tree, engine, class_of(version), objects_of(engine, version)
        ).items():
            found[path] = found.get(path, frozenset()) | words
    return found


def unread(engine: str, version: str) -> set[str]:
    """Return names of an engine's objects that the plug-in reads nothing of any more."""
    objects = objects_of(engine, version)
    reader = _Reader(engine, class_of(version), objects)
    for tree in map(_parsed, _files(engine)):
        reader.visit(tree)
    return set(objects) - reader.named


def problems(words: Words, facts: Facts, exact: Mapping[str, tuple[str, ...]]) -> list[str]:
    """Return what is missing or different, in words; `exact` may have no other parameters."""
    found = []
    for path, needed in words.items():
        there = facts.get(path) or []
        if path not in facts:
            found.append(f"{path} is gone")
        elif path in exact and list(exact[path]) != there:
            found.append(f"{path} takes {', '.join(there)}; expected {', '.join(exact[path])}")
        elif absent := sorted(needed - set(there)):
            found.append(f"{path} has no {', '.join(absent)}")
    return found


def _files(engine: str) -> list[Path]:
    return sorted((ROOT / "agentbench_kv" / "engines" / engine / "plugin").glob("*.py"))


def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def uses(tree: ast.Module, engine: str, version_class: str, objects: Mapping[str, str]) -> Words:
    """Return what a module of a plug-in uses of an engine: path -> words it is called with.

    That is names that are imported, their attributes, keywords they are called with, what our
    subclasses take from the classes they are made of, and attributes of what `objects` names, which
    has the class of each. Code for another version is left out.
    """
    reader = _Reader(engine, version_class, objects)
    reader.visit(tree)
    return {path: frozenset(words) for path, words in reader.found.items()}


class _Reader(ast.NodeVisitor):
    """Collects uses; imports come before what is imported is used."""

    def __init__(self, engine: str, version_class: str, objects: Mapping[str, str]) -> None:
        self.found: dict[str, set[str]] = {}
        self._engine = engine
        self._version_class = version_class
        self._objects = objects
        self.named: set[str] = set()  # of these, those that something is read of
        self._paths: dict[str, set[str]] = {}  # name here -> what it may be
        self._bases: list[str] = []  # of the class that is being read
        self._own: set[str] = set()  # attributes it has itself

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if (node.module or "").partition(".")[0] != self._engine:
            return
        for name in node.names:
            path = f"{node.module}:{name.name}"
            self.found.setdefault(path, set())
            self._paths.setdefault(name.asname or name.name, set()).add(path)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        if re.fullmatch(r"Sglang\d+", node.name) and node.name != self._version_class:
            return
        before = self._bases, self._own
        names = [base.id for base in node.bases if isinstance(base, ast.Name)]
        self._bases = [path for name in names for path in sorted(self._paths.get(name, ()))]
        self._own = set(_attributes(node))
        self.generic_visit(node)
        self._bases, self._own = before

    def visit_Attribute(self, node: ast.Attribute) -> None:
        holder = node.value
        if isinstance(holder, ast.Name) and holder.id in self._paths:
            for path in self._paths[holder.id]:
                self._use(path, node.attr)
        elif self._bases and _is_ours(holder) and "kvbench" not in node.attr:
            inherited = not isinstance(holder, ast.Name) or node.attr not in self._own
            for path in self._bases if inherited else ():
                self._use(path, node.attr)
        names = [name for name in _names_for(holder) if name in self._objects]
        if names and not re.search("kvbench|^__", node.attr):
            self.named.add(names[0])
            self._use(self._objects[names[0]], node.attr)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name):
            words = {each.arg for each in node.keywords if each.arg}
            for path in self._paths.get(node.func.id, ()):
                self.found[path] |= words
        self.generic_visit(node)

    def _use(self, path: str, attribute: str) -> None:
        self.found.setdefault(f"{path}.{attribute}", set())


def _names_for(holder: ast.expr) -> list[str]:
    """Return what an object may be called: `holder.name`, `name`, `name[]`, `name()`."""
    if isinstance(holder, ast.Call):
        return [f"{name}()" for name in _names_for(holder.func)[-1:]]
    if isinstance(holder, ast.Subscript):
        return [f"{name}[]" for name in _names_for(holder.value)[-1:]]
    if isinstance(holder, ast.Attribute):
        return [*(f"{name}.{holder.attr}" for name in _names_for(holder.value)[-1:]), holder.attr]
    return [holder.id] if isinstance(holder, ast.Name) else []


def _is_ours(holder: ast.expr) -> bool:
    """Return whether an expression is `self` or `super()`."""
    if isinstance(holder, ast.Call):
        return isinstance(holder.func, ast.Name) and holder.func.id == "super"
    return isinstance(holder, ast.Name) and holder.id == "self"


def _attributes(node: ast.ClassDef) -> Iterator[str]:
    """Name what a class has: methods, class attributes, and what its methods assign."""
    for statement in _flat(node.body):
        yield from _names_of(statement)
    for inner in ast.walk(node):
        if (
            isinstance(inner, ast.Attribute)
            and isinstance(inner.ctx, ast.Store)
            and isinstance(inner.value, ast.Name)
            and inner.value.id in ("self", "cls")
        ):
            yield inner.attr


def _names_of(statement: ast.stmt) -> list[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return [statement.name]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _flat(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Return statements, those of branches too."""
    for statement in body:
        yield statement
        for name in ("body", "orelse", "finalbody"):
            if isinstance(statement, (ast.If, ast.Try, ast.With)):
                yield from _flat(getattr(statement, name, ()))
        for handler in getattr(statement, "handlers", ()):
            yield from _flat(handler.body)


@dataclass(frozen=True)
class Place:
    """A definition in an engine's source."""

    module: str
    node: ast.AST = field(compare=False)


class Source:
    """An engine's modules, read and not run."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = cache(self._parse)

    def facts(self, paths: Iterable[str]) -> dict[str, list[str] | None]:
        """Return what there is of some paths; those that are gone are left out."""
        found = {path: self.resolve(path) for path in sorted(paths)}
        return {path: self.parameters(place) for path, place in found.items() if place is not None}

    def resolve(self, path: str) -> Place | None:
        """Find `module:Name.attribute`, or the same with a dot."""
        module, colon, name = path.partition(":")
        parts = name.split(".") if colon else []
        while not colon and self._read(module) is None and module:
            module, _, last = module.rpartition(".")
            parts.insert(0, last)
        place = self._module(module)
        for part in parts:
            if place is None:
                break
            place = self._member(place, part)
        return place

    def parameters(self, place: Place) -> list[str] | None:
        """Name the parameters of a function, or the fields or parameters that make an object."""
        node = place.node
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            named = [*given.posonlyargs, *given.args, given.vararg, *given.kwonlyargs, given.kwarg]
            return [each.arg for each in named if each is not None]
        if not isinstance(node, ast.ClassDef):
            return None
        lineage = self._lineage(place)
        if any(_has_fields(each.node) for each in lineage):
            return list(
                dict.fromkeys(name for each in lineage[::-1] for name in _fields(each.node))
            )
        made = self._member(place, "__init__")
        return None if made is None else (self.parameters(made) or [])[1:]

    def _module(self, name: str) -> Place | None:
        tree = self._read(name)
        return None if tree is None else Place(name, tree)

    def _parse(self, name: str) -> ast.Module | None:
        place = self._folder.joinpath(*name.split("."))
        for file in (place.with_name(f"{place.name}.py"), place / "__init__.py"):
            if name and file.is_file():
                return ast.parse(file.read_text(encoding="utf-8"))
        return None

    def _member(self, place: Place, name: str) -> Place | None:
        node = place.node
        if isinstance(node, ast.Module):
            return self._global(place, name)
        if isinstance(node, ast.AnnAssign):  # an object; its class is said
            kind = self._expression(place.module, node.annotation)
            return None if kind is None else self._member(kind, name)
        if not isinstance(node, ast.ClassDef):
            return None
        for each in self._lineage(place):
            for statement in _flat(getattr(each.node, "body", ())):
                if name in _names_of(statement):
                    return Place(each.module, statement)
            if isinstance(each.node, ast.ClassDef) and name in _attributes(each.node):
                return Place(each.module, ast.Pass())
        return None

    def _global(self, place: Place, name: str) -> Place | None:
        """Find a name of a module: defined there, imported there, or a module within it."""
        statements = list(_flat(getattr(place.node, "body", ())))
        for statement in statements:
            if name in _names_of(statement):
                return Place(place.module, statement)
        imports = (each for each in statements if isinstance(each, ast.ImportFrom))
        for statement, each in ((line, each) for line in imports for each in line.names):
            if each.name == "*" or name == (each.asname or each.name):
                origin = self._origin(place, statement)
                found = self.resolve(f"{origin}:{name if each.name == '*' else each.name}")
                if found is not None or each.name != "*":
                    return found
        return self._module(f"{place.module}.{name}")

    def _origin(self, place: Place, statement: ast.ImportFrom) -> str:
        """Return the module that a statement imports from."""
        if not statement.level:
            return statement.module or ""
        package = place.module.split(".")
        inside = (self._folder.joinpath(*package) / "__init__.py").is_file()
        up = package[: len(package) - statement.level + int(inside)]
        return ".".join([*up, *([statement.module] if statement.module else [])])

    def _lineage(self, place: Place) -> list[Place]:
        """Return a class and those it is made of, as far as they are the engine's."""
        found = [place]
        for base in getattr(place.node, "bases", ()):
            above = self._expression(place.module, base)
            found += [] if above is None else self._lineage(above)
        return found

    def _expression(self, module: str, node: ast.expr) -> Place | None:
        """Find what an expression of names, attributes and subscripts refers to."""
        if isinstance(node, ast.Name):
            here = self._module(module)
            return None if here is None else self._global(here, node.id)
        if isinstance(node, ast.Attribute):
            holder = self._expression(module, node.value)
            return None if holder is None else self._member(holder, node.attr)
        return self._expression(module, node.value) if isinstance(node, ast.Subscript) else None


def _has_fields(node: ast.AST) -> bool:
    """Return whether a class is a dataclass, or one of msgspec's."""
    said = [*getattr(node, "decorator_list", ()), *getattr(node, "bases", ())]
    return any(re.search(r"\bdataclass\b|\bStruct\b", ast.unparse(each)) for each in said)


def _fields(node: ast.AST) -> list[str]:
    body = [each for each in getattr(node, "body", ()) if isinstance(each, ast.AnnAssign)]
    kept = [each for each in body if "ClassVar" not in ast.unparse(each.annotation)]
    return [name for each in kept for name in _names_of(each)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("engine", choices=sorted(TESTED))
    parser.add_argument("version")
    parser.add_argument("source", type=Path, help="folder that the wheel was unpacked in")
    given = parser.parse_args()
    words = wanted(given.engine, given.version)
    facts = Source(given.source).facts(words)
    exact = listed(given.engine, given.version) if given.engine == "sglang" else {}
    file = facts_file(given.engine, given.version)
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(facts, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    print(
        "\n".join(problems(words, facts, exact)) or f"{file.name}: {len(facts)} symbols, all there"
    )


if __name__ == "__main__":
    main()
