"""Every text that a person reads is a template that the Spanish catalogue knows; exit code 1 if one is not.

    python tools/messages.py            what is wrong: a text put together, fields that do not fit, no translation
    python tools/messages.py --update   first brings `locale/es/LC_MESSAGES/cuadrilla.po` up to date: new templates
                                        come with an empty translation, those that nothing says go

Read from the syntax tree of `src/` and `recipes/`: the arguments of errors, of `Message`, of `say` and `emit`, of
`refuse`, of warnings and notes in the log, the help of commands, options and keys of a run file; and from pages. A
template that is a name is looked up among the constants of its module and of the one it is imported from. What is
neither (another error's message) is taken to be a message already.
"""

import argparse
import ast
import inspect
import json
import re
import string
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from babel.messages.catalog import Catalog
from babel.messages.pofile import read_po, write_po

from cuadrilla.messages import OF_THE_SYSTEM

ROOT = Path(__file__).parents[1] / "src" / "cuadrilla"
RECIPES = "recipes"
CATALOGUE = ROOT / "locale/es/LC_MESSAGES/cuadrilla.po"
WIDTH = 120
BASE = "CuadrillaError"
REFUSE = "refuse"
TALK = {"say", "say_at_once", "emit", "Message"}
LOGGED = {"warning", "error", "exception", "critical"}
HELP = {"Option", "Argument", "Verb", "Typer", "add_typer", "command"}
NOT_FIELDS = {"hint", "details", "wait_seconds"}  # of errors
NOT_FIELDS_OF_TALK = {"end", "fill"}
NOTHING_TO_TRANSLATE = "-"
WORD = re.compile(r"[^\W\d_]{2}")
PAGE_TEXT = re.compile(r'\b(?:say|_)\(("(?:[^"\\]|\\.)*")|data-label="([^"]*)"|data-text>([^<]+)<')
CONVERSION = re.compile(r"%(?:\.\d+)?[a-z%]")


@dataclass(frozen=True)
class Found:
    """A template, or what is wrong (`problem`), at its place in the code."""

    place: str
    template: str = ""
    problem: str = ""


@dataclass
class Module:
    name: str
    tree: ast.Module
    constants: dict[str, ast.expr] = field(default_factory=dict)
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)


def read_modules() -> dict[str, Module]:
    modules, recipes = {}, ROOT.parents[1] / RECIPES
    for path in sorted([*ROOT.rglob("*.py"), *recipes.rglob("*.py")]):
        parts = path.relative_to(ROOT.parent if ROOT in path.parents else recipes.parent).with_suffix("").parts
        module = Module(".".join(parts[:-1] if parts[-1] == "__init__" else parts), ast.parse(path.read_text("utf-8")))
        for assigned in module.tree.body:
            if isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Name):
                module.constants[assigned.targets[0].id] = assigned.value
            elif isinstance(assigned, ast.Assign) and isinstance(assigned.targets[0], ast.Tuple):
                names = [name.id for name in assigned.targets[0].elts if isinstance(name, ast.Name)]
                values = assigned.value.elts if isinstance(assigned.value, ast.Tuple) else []
                module.constants |= dict(zip(names, values, strict=False))
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ImportFrom) and node.module:
                for alias in node.names:
                    module.imported[alias.asname or alias.name] = (node.module, alias.name)
        modules[module.name] = module
    return modules


def error_classes(modules: dict[str, Module]) -> set[str]:
    bases = {
        node.name: {base.id for base in node.bases if isinstance(base, ast.Name)}
        for module in modules.values()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    }
    found = {BASE}
    while more := {name for name, of in bases.items() if of & found} - found:
        found |= more
    return found


class Reader:
    """Walks one module. `locals`: what is assigned to names in the function around a call."""

    def __init__(self, module: Module, modules: dict[str, Module], errors: set[str]) -> None:
        self.module, self.modules, self.errors = module, modules, errors

    def read(self) -> Iterator[Found]:
        for scope in ast.walk(self.module.tree):
            if isinstance(scope, ast.FunctionDef | ast.AsyncFunctionDef | ast.Module):
                local: dict[str, list[ast.expr]] = {}
                for node in own_nodes(scope):
                    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                        local.setdefault(node.targets[0].id, []).append(node.value)
                for node in own_nodes(scope):
                    if isinstance(node, ast.Call):
                        yield from self.call(node, {} if isinstance(scope, ast.Module) else local)
        if self.module.name.startswith("cuadrilla.cli."):
            yield from self.commands()
        if self.module.name == "cuadrilla.config":
            yield from self.keys()

    def keys(self) -> Iterator[Found]:
        """What is said of each key of a run file: the text under its field."""
        for section in ast.walk(self.module.tree):
            if isinstance(section, ast.ClassDef):
                for key, text in pairwise(section.body):
                    if isinstance(key, ast.AnnAssign) and isinstance(text, ast.Expr):
                        yield self.found(text, template=inspect.cleandoc(ast.literal_eval(text.value)))

    def commands(self) -> Iterator[Found]:
        """The help of commands is their docstring: of functions that Typer knows, or that `VERBS` names."""
        verbs = self.modules["cuadrilla.cli.verbs"].constants["VERBS"]
        assert isinstance(verbs, ast.Dict)
        named = set()
        for verb in verbs.values:
            assert isinstance(verb, ast.Call)
            module, name, panel, _ = (
                ast.literal_eval(arg) if isinstance(arg, ast.Constant) else arg for arg in verb.args
            )
            if f"cuadrilla.cli.{module}" == self.module.name:
                named.add(name)
            if self.module.name == "cuadrilla.cli.verbs" and isinstance(panel, ast.Name):
                yield from self.texts(panel, {}, set(), verb)
        for node in self.module.tree.body:
            if isinstance(node, ast.FunctionDef) and (doc := ast.get_docstring(node)):
                decorated = any(
                    "command" in ast.dump(decorator) or "callback" in ast.dump(decorator)
                    for decorator in node.decorator_list
                )
                if decorated or node.name in named:
                    yield self.found(node, template=inspect.cleandoc(doc))

    def call(self, node: ast.Call, local: dict[str, list[ast.expr]]) -> Iterator[Found]:
        name = node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        keywords = {word.arg: word.value for word in node.keywords if word.arg}
        if isinstance(owner, ast.Name) and owner.id == "log":
            if name in LOGGED:
                yield from self.texts(node.args[0], local, None, node)
            elif name == "log":
                yield from self.texts(node.args[1], local, None, node)
        elif name in self.errors or name in TALK:
            starred = any(word.arg is None for word in node.keywords)
            fields = None if starred else keywords.keys() - (NOT_FIELDS if name in self.errors else NOT_FIELDS_OF_TALK)
            parts = [*node.args[:1], *([keywords["hint"]] if "hint" in keywords and name in self.errors else [])]
            found = [text for part in parts for text in self.texts(part, local, fields, node)]
            yield from found
            used = {used for each in found for used in placeholders(each.template)}
            if fields is not None and (fields - used):
                yield self.found(node, problem=f"no template names {', '.join(sorted(fields - used))}")
            if fields and node.args and not self.resolved(node.args[0], local):
                yield self.found(node, problem="a template that is no literal must not be given fields")
        elif name == REFUSE:
            yield from self.texts(node.args[1], local, set(), node)
        elif name in HELP:
            if "help" in keywords:
                yield from self.texts(keywords["help"], local, set(), node)
            elif name == "Verb" and len(node.args) == 4:
                yield from self.texts(node.args[3], local, set(), node)

    def texts(
        self, part: ast.expr, local: dict[str, list[ast.expr]], fields: set[str] | None, node: ast.Call
    ) -> Iterator[Found]:
        """The templates that an expression may be, and what is wrong with them. `fields` None: not checked."""
        for text in self.resolved(part, local):
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                yield from self.literal(text.value, fields, node)
            elif isinstance(text, ast.JoinedStr | ast.BinOp):
                yield self.found(node, problem="put together: use a template with fields")
            elif isinstance(text, ast.Call) and name_of(text) != "Message":
                yield self.found(node, problem="put together by `join` or `format`: use a template with fields")

    def literal(self, text: str, fields: set[str] | None, node: ast.Call) -> Iterator[Found]:
        is_help = name_of(node) in HELP
        if WORD.search(re.sub(r"\{[^}]*\}", "", text)):
            yield self.found(node, template=inspect.cleandoc(text) if is_help else text)
        else:
            yield Found(NOTHING_TO_TRANSLATE, template=text)
        lacking = placeholders(text) - fields - {""} if fields is not None and not is_help else set()
        if lacking:
            yield self.found(node, problem=f"{text[:50]!r} is not given {', '.join(sorted(lacking))}")

    def resolved(self, part: ast.expr, local: dict[str, list[ast.expr]]) -> list[ast.expr]:
        match part:
            case ast.IfExp():
                return [*self.resolved(part.body, local), *self.resolved(part.orelse, local)]
            case ast.Name() if part.id in local:
                values = [
                    value for value in local[part.id] if not (isinstance(value, ast.Name) and value.id == part.id)
                ]
                return [text for value in values for text in self.resolved(value, {})]
            case ast.Name() if part.id in self.module.constants:
                return [self.module.constants[part.id]]
            case ast.Name() if part.id in self.module.imported:
                module, name = self.module.imported[part.id]
                there = self.modules.get(module)
                return [there.constants[name]] if there and name in there.constants else []
            case ast.Constant() | ast.JoinedStr() | ast.BinOp():
                return [part]
            case ast.Call() if isinstance(part.func, ast.Attribute) and part.func.attr in ("join", "format"):
                return [part]
        return []

    def found(self, node: ast.AST, *, template: str = "", problem: str = "") -> Found:
        place = f"{self.module.name.replace('.', '/')}.py:{getattr(node, 'lineno', 0)}"
        return Found(place, template=template, problem=problem)


def read_pages() -> Iterator[Found]:
    """What pages say: `say("…")` and `_("…")` in their scripts, what is marked in their HTML."""
    for path in (path for suffix in ("js", "html") for path in sorted(ROOT.rglob(f"*.{suffix}"))):
        inside = path.relative_to(ROOT)
        for said in PAGE_TEXT.finditer(path.read_text("utf-8")) if "vendor" not in inside.parts else ():
            template = json.loads(said[1]) if said[1] else said[2] or said[3]
            if WORD.search(re.sub(r"\{[^}]*\}", "", template)):
                yield Found(f"cuadrilla/{inside}", template=template)


def name_of(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def own_nodes(scope: ast.AST) -> Iterator[ast.AST]:
    """Those of a function, without those of functions in it; a lambda's are its own."""
    for child in ast.iter_child_nodes(scope):
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield child
            yield from own_nodes(child)
        else:
            for default in (*child.args.defaults, *(d for d in child.args.kw_defaults if d), *child.decorator_list):
                yield from ast.walk(default)
            for argument in (*child.args.args, *child.args.kwonlyargs):
                if argument.annotation:
                    yield from ast.walk(argument.annotation)


def placeholders(template: str) -> set[str]:
    """The names of a template's fields; those of the log have none."""
    try:
        names = {name for _, name, _, _ in string.Formatter().parse(template) if name is not None}
    except ValueError:
        return {"(braces that do not match)"}
    return {name for name in names if name.isidentifier() or not name}  # `{"text": ...}` is an example of JSON


def mistranslated(template: str, translation: str) -> str:
    if placeholders(template) != placeholders(translation):
        return f"the translation of {template[:60]!r} has other fields"
    if CONVERSION.findall(template) != CONVERSION.findall(translation):
        return f"the translation of {template[:60]!r} has other %-conversions, or in another order"
    return ""


def read_catalogue() -> Catalog:
    with CATALOGUE.open("rb") as file:
        return read_po(file, locale="es")


def update(wanted: dict[str, set[str]]) -> None:
    """Write the catalogue with these templates, each with the files that say it, and the translations there are."""
    before = read_catalogue()
    after = Catalog("es", header_comment=before.header_comment, fuzzy=False)
    after.mime_headers = before.mime_headers
    for template, files in wanted.items():
        after.add(template, known.string if (known := before.get(template)) else "", [(file, 0) for file in files])
    with CATALOGUE.open("wb") as file:
        write_po(file, after, width=WIDTH, sort_output=True, include_lineno=False)


def problems_of(catalogue: Catalog, wanted: dict[str, set[str]]) -> Iterator[str]:
    """What is wrong with the translations themselves."""
    for entry in catalogue:
        template, translation = str(entry.id), str(entry.string)
        if template and template not in wanted:
            yield f"{CATALOGUE.name}: nothing says {template[:60]!r}: --update"
        elif template and translation and (wrong := mistranslated(template, translation)):
            yield f"{CATALOGUE.name}: {wrong}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    modules = read_modules()
    errors = error_classes(modules)
    found = [each for module in modules.values() for each in Reader(module, modules, errors).read()]
    found += read_pages()
    found += [Found("cuadrilla/messages.py", template=text) for text in OF_THE_SYSTEM]
    wanted: dict[str, set[str]] = {}
    for each in found:
        if each.template and each.place != NOTHING_TO_TRANSLATE:
            wanted.setdefault(each.template, set()).add(each.place.partition(":")[0])
    if arguments.update:
        update(wanted)
    catalogue = read_catalogue()
    missing = [template for template in wanted if not ((known := catalogue.get(template)) and known.string)]
    problems = [f"{each.place}: {each.problem}" for each in found if each.problem]
    problems += [f"{min(wanted[template])}: no translation of {template[:70]!r}" for template in missing]
    problems += problems_of(catalogue, wanted)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"messages: {len(wanted)} templates, {len(missing)} without a translation, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
