"""The limits that keep the code readable and safe, measured from the syntax tree; exit code 1 if one is passed.

    python tools/budgets.py            the tables
    python tools/budgets.py --lower    sizes.txt gets today's sizes where they are smaller

`src/` and `tools/` are measured; `tests/` and `bench/` only for their lengths. A line of the first table is value,
limit and the worst places. Limits are those of CONTRIBUTING.md. The second table has the size of each package: what it
may have (sizes.txt, which only falls), and the target beside it.
"""

import ast
import graphlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuadrilla.cli.verbs import VERBS

FUNCTION_P90_LINES = 25
FUNCTION_MAX_LINES = 80
LONGER_FUNCTIONS = {("src/cuadrilla/train/loop.py", "train"): 150}  # the loop reads top to bottom in one place
FILE_MAX_LINES = 600
MAX_BROAD_EXCEPTS = 3  # the CLI, the entry of a worker thread, the coordinator
HELP_TIMEOUT_SECONDS = 120.0

# Where a call or an import that is dangerous, or belongs to one place, is allowed. Paths below src/cuadrilla;
# an entry that ends in / is a folder.
DANGEROUS_MODULES = ("pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "jsonpickle")
DANGEROUS_NAMES = ("eval", "exec", "__import__")
DANGEROUS_CALLS = (
    "torch.load",
    "torch.save",
    "torch.package.PackageImporter",
    "torch.distributed.all_gather_object",
    "torch.distributed.broadcast_object_list",
    "torch.distributed.gather_object",
    "torch.distributed.recv_object_list",
    "torch.distributed.scatter_object_list",
    "torch.distributed.send_object_list",
    "yaml.load",
    "yaml.unsafe_load",
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "ssl._create_unverified_context",
)
RESTRICTED_READER = "model/weights.py"  # may call torch.load(weights_only=True), and name its error
TORCH_FREE = ("cli/", "config.py", "doctor/", "errors.py", "host/", "log.py", "monitor/", "plan/", "rundir.py")
HOMES = {  # a heavy library is imported in its own place only
    "ray": ("examples/",),
    "distributed": ("examples/",),
    "fastapi": ("serve/", "monitor/web/"),
    "gguf": ("model/gguf.py",),
    "grpc": tuple(f"link/{part}.py" for part in ("client", "server")),
}
ALL_INTERFACES = re.compile(r"^\s*(?:\w+://)?(?:0\.0\.0\.0|\[::\]|::)(?::\d*)?(?:/.*)?\s*$")

TOGETHER = {"src/sync+plan": ("src/sync", "src/plan"), "src/tune+jobs": ("src/tune", "src/jobs")}
PAGE_SUFFIXES = (".js", ".css", ".html", ".json")

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """One parsed file; `path` is relative to the checkout, with forward slashes."""

    path: str
    text: str
    tree: ast.Module

    @property
    def inside(self) -> str:
        """The path below src/cuadrilla, or "" for a file outside it."""
        return self.path.removeprefix("src/cuadrilla/") if self.path.startswith("src/cuadrilla/") else ""


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    value: str
    limit: str
    violations: tuple[str, ...]


def parse(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, filename=path))


def read_sources(root: Path, folders: Iterable[str]) -> list[Source]:
    found = []
    for folder in folders:
        for path in sorted((root / folder).rglob("*.py")):
            found.append(parse(path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")))
    return found


def in_place(inside: str, places: Sequence[str]) -> bool:
    return any(inside.startswith(place) if place.endswith("/") else inside == place for place in places)


def functions(source: Source) -> Iterator[Function]:
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def check_functions(sources: Sequence[Source]) -> list[Line]:
    lengths = sorted(length(function) for source in sources for function in functions(source)) or [0]
    p90 = lengths[(len(lengths) * 9 + 9) // 10 - 1]
    too_long = [
        f"{source.path}:{function.lineno} {function.name} has {length(function)} lines"
        for source in sources
        for function in functions(source)
        if length(function) > LONGER_FUNCTIONS.get((source.path, function.name), FUNCTION_MAX_LINES)
    ]
    over = [f"nine of ten functions have up to {p90} lines"] if p90 > FUNCTION_P90_LINES else []
    return [
        Line("function length, p90", str(p90), str(FUNCTION_P90_LINES), tuple(over)),
        Line("function length, max", str(lengths[-1]), f"{FUNCTION_MAX_LINES} (train: 150)", tuple(too_long)),
    ]


def check_files(sources: Sequence[Source]) -> list[Line]:
    sizes = {source.path: len(source.text.splitlines()) for source in sources}
    over = tuple(f"{path} has {lines} lines" for path, lines in sizes.items() if lines > FILE_MAX_LINES)
    return [Line("file length, max", str(max(sizes.values(), default=0)), str(FILE_MAX_LINES), over)]


def unannotated(function: Function) -> list[str]:
    """Parameters without a type (self and cls excepted), and `return` if that has none."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    if positional and positional[0].arg in ("self", "cls") and positional[0].annotation is None:
        positional = positional[1:]
    every = [*positional, *arguments.kwonlyargs, *filter(None, (arguments.vararg, arguments.kwarg))]
    missing = [argument.arg for argument in every if argument.annotation is None]
    return [*missing, *(["return"] if function.returns is None else [])]


def check_annotations(sources: Sequence[Source]) -> list[Line]:
    every = [(source, function) for source in sources for function in functions(source)]
    bare = [(source, function, unannotated(function)) for source, function in every if unannotated(function)]
    share = 100.0 * (len(every) - len(bare)) / len(every) if every else 100.0
    over = tuple(
        f"{source.path}:{function.lineno} {function.name}: {', '.join(names)}" for source, function, names in bare
    )
    return [Line("annotated signatures", f"{share:.1f} %", "100 %", over)]


def is_broad(handler: ast.ExceptHandler) -> bool:
    """Catches everything and does not raise it again at its end."""
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    broad = any(kind is None or dotted(kind, {}) in ("Exception", "BaseException") for kind in caught)
    last = handler.body[-1]
    return broad and not (isinstance(last, ast.Raise) and last.exc is None)


def suppresses_all(call: ast.Call) -> bool:
    """`contextlib.suppress(Exception)`."""
    name = dotted(call.func, {}) or ""
    return name.endswith("suppress") and any(dotted(kind, {}) in ("Exception", "BaseException") for kind in call.args)


def check_excepts(sources: Sequence[Source]) -> list[Line]:
    places = [
        f"{source.path}:{node.lineno}"
        for source in sources
        for node in ast.walk(source.tree)
        if (isinstance(node, ast.ExceptHandler) and is_broad(node))
        or (isinstance(node, ast.Call) and suppresses_all(node))
    ]
    over = tuple(places) if len(places) > MAX_BROAD_EXCEPTS else ()
    return [Line("broad excepts", str(len(places)), str(MAX_BROAD_EXCEPTS), over)]


def dotted(node: ast.expr | None, aliases: dict[str, str]) -> str | None:
    """`a.b.c` as written, with the first name replaced by what it was imported as."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    return ".".join([aliases.get(node.id, node.id), *reversed(parts)])


def imported(node: ast.AST) -> list[tuple[str, str]]:
    """(full name, name it is bound to) for each thing that an import statement brings."""
    if isinstance(node, ast.Import):
        return [(alias.name, alias.asname or alias.name.split(".")[0]) for alias in node.names]
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return [(f"{node.module}.{alias.name}", alias.asname or alias.name) for alias in node.names]
    return []


def import_aliases(source: Source) -> dict[str, str]:
    aliases: dict[str, str] = {}
    for node in ast.walk(source.tree):
        for full, bound in imported(node):
            plain = isinstance(node, ast.Import) and "." in full and bound == full.split(".")[0]
            aliases[bound] = bound if plain else full
    return aliases


def passes_true(call: ast.Call, argument: str) -> bool:
    return any(
        keyword.arg == argument and isinstance(keyword.value, ast.Constant) and keyword.value.value is True
        for keyword in call.keywords
    )


def dangerous(source: Source) -> Iterator[str]:
    aliases = import_aliases(source)
    for node in ast.walk(source.tree):
        where = f"{source.path}:{getattr(node, 'lineno', 0)}"
        for full, _ in imported(node):
            named = full == "pickle.UnpicklingError" and source.inside == RESTRICTED_READER
            if not named and (full.split(".")[0] in DANGEROUS_MODULES or full in DANGEROUS_CALLS):
                yield f"{where} imports {full}"
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func, aliases)
        restricted = name == "torch.load" and source.inside == RESTRICTED_READER and passes_true(node, "weights_only")
        if (name in DANGEROUS_NAMES or name in DANGEROUS_CALLS) and not restricted:
            yield f"{where} calls {name}"
        for argument in ("shell", "allow_pickle", "trust_remote_code"):
            if passes_true(node, argument):
                yield f"{where} passes {argument}=True"


def misplaced(source: Source) -> Iterator[str]:
    """Imports and prints that belong to another place, and addresses that open a port to everybody."""
    for node in ast.walk(source.tree):
        where = f"{source.path}:{getattr(node, 'lineno', 0)}"
        for full, _ in imported(node):
            package = full.split(".")[0]
            if package == "torch" and in_place(source.inside, TORCH_FREE):
                yield f"{where} imports torch in a torch-free place"
            if package in HOMES and not in_place(source.inside, HOMES[package]):
                yield f"{where} imports {package} outside {', '.join(HOMES[package])}"
        if isinstance(node, ast.Call) and dotted(node.func, {}) == "print" and not source.inside.startswith("cli/"):
            yield f"{where} prints outside cli/"
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and ALL_INTERFACES.match(node.value):
            yield f"{where} names all interfaces: {node.value!r}"


def check_forbidden(sources: Sequence[Source]) -> list[Line]:
    bad = tuple(text for source in sources for text in dangerous(source))
    astray = tuple(text for source in sources if source.inside for text in misplaced(source))
    return [
        Line("dangerous calls and imports", str(len(bad)), "0", bad),
        Line("prints, imports, addresses astray", str(len(astray)), "0", astray),
    ]


def check_names(sources: Sequence[Source]) -> list[Line]:
    """A public class has a name of its own: who searches for it finds one."""
    places: dict[str, list[str]] = {}
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(source.path)
    over = tuple(f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1)
    return [Line("class names in two places", str(len(over)), "0", over)]


def module_name(path: str) -> str:
    return path.removeprefix("src/").removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def find_cycle(sources: Sequence[Source]) -> list[str]:
    """Modules of one import cycle, first and last the same; empty if there is none."""
    names = {module_name(source.path) for source in sources}
    graph: dict[str, set[str]] = {}
    for source in sources:
        edges = graph.setdefault(module_name(source.path), set())
        for full in (full for node in ast.walk(source.tree) for full, _ in imported(node)):
            target = full if full in names else full.rpartition(".")[0]
            if target in names and target != module_name(source.path):
                edges.add(target)
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return [str(name) for name in error.args[1]]
    return []


def check_cycles(sources: Sequence[Source]) -> list[Line]:
    cycle = find_cycle(sources)
    over = (" imports ".join(reversed(cycle)),) if cycle else ()
    return [Line("import cycles", "1 or more" if cycle else "0", "0", over)]


HELP = """
import sys
sys.argv = ["cuadrilla", "--help"]
from cuadrilla.cli import main
try:
    main()
finally:
    print("heavy:", *sorted({"torch", "ray", "dask", "transformers"} & set(sys.modules)), file=sys.stderr)
"""


def check_help(root: Path) -> list[Line]:
    """`cuadrilla --help` works and loads nothing heavy. Its time is recorded, not limited."""
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", HELP],
            capture_output=True,
            text=True,
            timeout=HELP_TIMEOUT_SECONDS,
            cwd=root,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [Line("--help without torch", "no answer", "", (f"did not answer in {HELP_TIMEOUT_SECONDS:g} s",))]
    seconds = time.perf_counter() - started
    heavy = [line.removeprefix("heavy:").strip() for line in done.stderr.splitlines() if line.startswith("heavy:")]
    over = []
    if done.returncode or "Usage" not in done.stdout:
        over.append(f"exit code {done.returncode}: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
    elif heavy != [""]:
        over.append(f"loads {', '.join(heavy)}")
    return [Line("--help without torch", f"{seconds:.2f} s", "not gated", tuple(over))]


def check_version(package_text: str, changelog: str) -> list[Line]:
    version = re.search(r'^__version__ = "([^"]+)"', package_text, re.MULTILINE)
    entry = re.search(r"^## \[(\d[^\]]*)\]", changelog, re.MULTILINE)
    package, top = (version[1] if version else "none"), (entry[1] if entry else "none")
    over = () if version and package == top else (f"__version__ is {package}, CHANGELOG's newest entry is {top}",)
    return [Line("version = CHANGELOG's newest", package, top, over)]


@dataclass(frozen=True)
class Size:
    """One line of sizes.txt: a package, what it may have now and what it is to have in the end (lines, or programs)."""

    name: str
    allowed: int
    target: int


def read_sizes(text: str) -> list[Size]:
    rows = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [Size(name, int(allowed), int(target)) for name, allowed, target in rows]


def write_sizes(sizes: Sequence[Size], found: Mapping[str, int]) -> str:
    """The text of sizes.txt, with what was found where that is less than what was allowed."""
    rows = [f"{size.name:<28}{min(size.allowed, found.get(size.name, 0)):>8}{size.target:>8}\n" for size in sizes]
    return f"{'# what':<28}{'allowed':>8}{'target':>8}\n{''.join(rows)}"


def measure_sizes(root: Path) -> dict[str, int]:
    """Lines of Python by package, and what else is to become small; generated code is left out."""
    package = root / "src/cuadrilla"
    found = {"src/root": count_lines(package.glob("*.py"))}
    for folder in sorted(path for path in package.iterdir() if (path / "__init__.py").exists()):
        found[f"src/{folder.name}"] = count_lines(folder.rglob("*.py"))
    for name, parts in TOGETHER.items():
        found[name] = sum(found.pop(part, 0) for part in parts)
    benches = [(path.stem, path.read_text(encoding="utf-8")) for path in (root / "bench").glob("*.py")]
    pages = [path for kind in PAGE_SUFFIXES for path in package.rglob(f"*{kind}") if "vendor" not in path.parts]
    return found | {
        "src": count_lines(package.rglob("*.py")),
        "tests": count_lines((root / "tests").rglob("*.py")),
        "bench": count_lines((root / "bench").glob("*.py")),
        "bench-programs": sum(f"python -m bench.{name} " in f"{text} " for name, text in benches),
        "pages": count_lines(pages),
        "docs/architecture.md": count_lines([root / "docs/architecture.md"]),
        "docs/experiments.md": count_lines([root / "docs/experiments.md"]),
        "commands": sum(bool(verb.panel) for verb in VERBS.values()),
    }


def count_lines(paths: Iterable[Path]) -> int:
    return sum(path.read_bytes().count(b"\n") for path in paths)


def check_sizes(sizes: Sequence[Size], found: Mapping[str, int]) -> list[Line]:
    unlisted = sorted(set(found) - {size.name for size in sizes})
    lines = [Line(name, str(found[name]), "", (f"{name} is not in tools/sizes.txt",)) for name in unlisted]
    for size in sizes:
        lines_now = found.get(size.name, 0)
        over = (f"has {lines_now}, may have {size.allowed}",) if lines_now > size.allowed else ()
        lines.append(Line(size.name, str(lines_now), f"{size.allowed} (target {size.target})", over))
    return lines


def show(lines: Sequence[Line], write: Callable[[str], object]) -> int:
    """Print the table and what is over; returns the exit code."""
    widths = [
        max(len(text) for text in column) for column in zip(*((x.name, x.value, x.limit) for x in lines), strict=True)
    ]
    for line in lines:
        cells = [text.ljust(width) for text, width in zip((line.name, line.value, line.limit), widths, strict=True)]
        write(f"{'OVER' if line.violations else 'ok  '}  {'  '.join(cells)}".rstrip() + "\n")
    for line in lines:
        for violation in line.violations:
            write(f"  {line.name}: {violation}\n")
    return int(any(line.violations for line in lines))


def main(root: Path, *, lower: bool = False) -> int:
    table = root / "tools/sizes.txt"
    sizes, found = read_sizes(table.read_text(encoding="utf-8")), measure_sizes(root)
    if lower:
        table.write_text(write_sizes(sizes, found), encoding="utf-8")
        sizes = read_sizes(table.read_text(encoding="utf-8"))
    measured = read_sources(root, ["src", "tools"])
    package = [source for source in measured if source.inside]
    lines = [
        *check_functions(measured),
        *check_files([*measured, *read_sources(root, ["tests", "bench"])]),
        *check_annotations(measured),
        *check_excepts(package),
        *check_names(package),
        *check_cycles(package),
        *check_forbidden(package),
        *check_version(
            (root / "src/cuadrilla/version.py").read_text(encoding="utf-8"),
            (root / "CHANGELOG.md").read_text(encoding="utf-8"),
        ),
        *check_help(root),
    ]
    return show(lines, sys.stdout.write) | show(check_sizes(sizes, found), sys.stdout.write)


if __name__ == "__main__":
    sys.exit(main(Path(__file__).resolve().parents[1], lower="--lower" in sys.argv[1:]))
