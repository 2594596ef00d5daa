"""Measures for the structure gates: code lines, long functions, missing docstrings, repeated names, words, Any.

`python tests/structure.py` prints the figures, with names of rooms also their unwanted words, and with --lower it
lowers the limits in tests/structure.toml to the present figures.
"""

import ast
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LIMITS = ROOT / "tests/structure.toml"
TOPS = ("rlsys", "workers", "trainer")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 80
MAX_PARAMETERS = 12
MAX_TEST_NAME = 90

# Words that are not idiomatic here -> what to use instead. A word also matches inside a name, between underscores.
WORDS = {
    r"told": "reported, printed, raised, given",
    r"(?<!file\.)tells?": "print(s), report(s), say(s), show(s)",
    r"telling": "reporting, printing",
    r"sense": "check",
    r"elsewhere": "the place: in the caller, in other systems, in the worker",
    r"lies": "is, is stored",
    r"strangers?|strange": "unexpected, mismatched, unknown",
    r"each so many": "every N",
    r"(?:is|are|not) well": "healthy, fine, passed",
    r"kin": "similar, related models",
    r"anew": "again, from scratch",
    r"seldom": "rarely",
    r"by itself": "alone, automatically, on its own",
    r"of the user's|of the user s": "user-defined",
    r"ha(?:s|ve) no use for": "does not use, does not support",
    r"(?:say|says|saying) nothing": "has no effect on, ignores",
    r"somebody|someone": "the caller, another process, a user",
    r"whoever": "the caller, any code that",
    r"nobody": "no caller, nothing, no reader",
    r"nothing is left to do": "there is no work left",
    r"goes on|go on": "continues, continue",
    r"all the same": "anyway",
    r"without effect": "ignored, has no effect",
    r"nothing happens": "no progress",
    r"makes some": "creates them",
    r"said": "reported, printed",
    r"is as it was": "is unchanged",
    r"lets go": "releases",
    r"go through": "run over, iterate over",
    r"is there twice": "is duplicated",
    r"what it was": "its value",
    r"wherever|whichever": "any",
    r"thereby|therein|thereof|whereof|whence|hence": "so",
    r"in vain": "without result",
    r"of its kind": "of that type",
    r"on the way": "in transit, meanwhile",
    r"of one's own": "custom",
}
_WORDS = re.compile(rf"(?<![A-Za-z])(?:{'|'.join(WORDS)})(?![A-Za-z])", re.IGNORECASE)


_FOUND = re.compile(r"(?<![\w.\"'])(?:(?:for|as) found\b|found(?=(?:, \w+)*(?:: [^=\n]+)? :?= |: [\w\[\], |.]+[,)]))")


@dataclass(eq=False)
class Source:
    """A Python file: its path from the root of the repository, text, tree and room."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    @property
    def room(self) -> str:
        return room_of(self.path)


def room_of(path: str) -> str:
    """The room that a file is counted in: rlsys/<room>, workers, trainer, scripts, tests/<folder>, docs."""
    parts = Path(path).parts
    if parts[0] == "rlsys":
        return "/".join(parts[:2]) if len(parts) > 2 else "rlsys"
    if parts[0] == "tests":
        return "/".join(parts[: min(len(parts) - 1, 3)])
    if parts[:2] == ("scripts", "bench"):
        return "scripts/bench"
    return parts[0] if parts[0] in ("workers", "trainer", "scripts") else "docs"


@cache
def sources() -> tuple[Source, ...]:
    """Every Python file of the product, the scripts and the tests."""
    files = [p for top in (*TOPS, "scripts", "tests") for p in sorted((ROOT / top).rglob("*.py"))]
    return tuple(Source(str(p.relative_to(ROOT)), p.read_text()) for p in files)


@cache
def product() -> tuple[Source, ...]:
    """The files that the budget counts: rlsys, workers and trainer."""
    return tuple(s for s in sources() if s.path.startswith(tuple(f"{top}/" for top in TOPS)))


@cache
def library() -> tuple[Source, ...]:
    """The product and the scripts."""
    return product() + tuple(s for s in sources() if s.path.startswith("scripts/"))


@cache
def statements(source: Source) -> tuple[ast.stmt, ...]:
    """Every statement of a file, without looking into expressions, which would take much longer."""
    done: list[ast.stmt] = []
    waiting: list[ast.AST] = [source.tree]
    while waiting:
        node = waiting.pop()
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            children = getattr(node, part, ())
            waiting.extend(children)
            done.extend(child for child in children if isinstance(child, ast.stmt))
    return tuple(done)


def code_lines(source: Source) -> int:
    """Lines that have a token outside comments and docstrings."""
    docs: set[int] = set()
    num_docs = 0
    for node in statements(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            docs.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
            num_docs += source.lines[node.lineno - 1].lstrip("rR ").startswith('"""')
    lines = {n for n, line in enumerate(source.lines, 1) if (text := line.strip()) and not text.startswith("#")}
    if source.text.count('"""') > 2 * num_docs or "'''" in source.text:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines - docs)


@cache
def code_lines_by_room() -> Counter[str]:
    lines: Counter[str] = Counter()
    for source in product():
        lines[source.room] += code_lines(source)
    return +lines


@cache
def any_lines_by_room() -> Counter[str]:
    """Lines of the product that use typing.Any, imports apart."""
    uses = re.compile(r"^(?!.*import).*\bAny\b", re.MULTILINE)
    return Counter(s.room for s in product() for _ in uses.finditer(s.text))


def functions(source: Source) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Every function and method of a file."""
    return (n for n in statements(source) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Named parameters without self and cls."""
    names = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
    return len(names) - (names[:1] in (["self"], ["cls"]))


def classes_by_name() -> dict[str, list[str]]:
    """Files that define a top-level class, by its name."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in product():
        for node in source.tree.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(source.path)
    return places


def files_by_name() -> dict[str, list[str]]:
    """Files by their name without folders; __init__ and the entry points main_* are not counted."""
    places: dict[str, list[str]] = defaultdict(list)
    for source in product():
        if Path(source.path).stem not in ("__init__", "__main__"):
            places[Path(source.path).stem].append(source.path)
    return places


def functions_without_docstring() -> list[str]:
    """Public top-level functions of the product and the scripts as path:name."""
    return [
        f"{s.path}:{node.name}"
        for s in library()
        if not s.path.startswith("scripts/bench/")
        for node in s.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and not node.name.startswith("_")
        and ast.get_docstring(node) is None
    ]


def _texts() -> Iterator[tuple[str, str]]:
    for source in sources():
        yield source.path, source.text
    others = [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("scripts/**/*.sh"), *ROOT.glob("rlsys/**/*.yaml")]
    for path in others:
        yield str(path.relative_to(ROOT)), path.read_text()


@cache
def words_by_room() -> dict[str, list[str]]:
    """Each use of a word that we do not use, as "path:line: word -> what to use", by room."""
    uses: dict[str, list[str]] = defaultdict(list)
    for path, text in _texts():
        if path in ("tests/structure.py", "CONTRIBUTING.md"):
            continue
        for match in _WORDS.finditer(text.replace("_", " ")):
            line = text.count("\n", 0, match.start()) + 1
            instead = next(new for old, new in WORDS.items() if re.fullmatch(old, match.group(), re.IGNORECASE))
            uses[room_of(path)].append(f"{path}:{line}: {match.group()!r} -> {instead}")
    for source in sources():
        for match in _FOUND.finditer(source.text) if source.path != "tests/structure.py" else ():
            line = source.text.count("\n", 0, match.start()) + 1
            uses[source.room].append(f"{source.path}:{line}: a variable 'found' -> name the thing")
    return dict(uses)


def limits() -> dict:
    """The present limits, from tests/structure.toml."""
    return tomllib.loads(LIMITS.read_text())


def figures() -> str:
    """The measures of the whole tree, for people."""
    lines, words = code_lines_by_room(), words_by_room()
    longest = max((len(s.lines), s.path) for s in library())
    function = max((n.end_lineno - n.lineno + 1, f"{s.path}:{n.name}") for s in library() for n in functions(s))
    any_lines = any_lines_by_room()
    rooms = ", ".join(f"{room.removeprefix('rlsys/')} {n}" for room, n in sorted(lines.items()))
    return "\n".join(
        [
            f"code lines: {sum(lines.values())} ({rooms})",
            f"longest file: {longest[0]} lines ({longest[1]}); longest function: {function[0]} lines ({function[1]})",
            f"words we do not use: {sum(map(len, words.values()))} ("
            + ", ".join(f"{room} {len(uses)}" for room, uses in sorted(words.items(), key=lambda u: -len(u[1])))
            + ")",
            f"lines with Any: {any_lines.total()} ("
            + ", ".join(f"{room.removeprefix('rlsys/')} {n}" for room, n in any_lines.most_common())
            + ")",
            f"public functions without docstring: {len(functions_without_docstring())}; class names defined twice: "
            f"{sum(len(p) > 1 for p in classes_by_name().values())}",
        ]
    )


def lowered(text: str) -> str:
    """The limits with every figure that has fallen replaced by the present one, and mended exceptions removed."""
    lines, words = code_lines_by_room(), words_by_room()
    undocumented, classes, names = set(functions_without_docstring()), classes_by_name(), files_by_name()
    kept, room = [], ""
    for line in text.splitlines():
        key, _, value = (part.strip() for part in line.partition("="))
        if header := re.fullmatch(r'\[rooms\."(.+)"\]', line):
            room = header[1]
        elif line.startswith("["):
            room = ""
        if room and key in ("code", "words") and value.isdigit():
            now = lines[room] if key == "code" else len(words.get(room, []))
            line = f"{key} = {min(int(value), now)}"
        elif key == "any_lines":
            line = f"{key} = {min(int(value), any_lines_by_room().total())}"
        elif item := re.fullmatch(r' *"([^"]+)",', line):
            if ".py:" in item[1] and item[1] not in undocumented | set(wide_functions()):
                continue
            if item[1].isidentifier() and max(len(classes.get(item[1], [])), len(names.get(item[1], []))) < 2:
                continue
        kept.append(line)
    return "\n".join(kept) + "\n"


def wide_functions() -> list[str]:
    """Functions with more parameters than the limit, as path:name."""
    return [f"{s.path}:{f.name}" for s in library() for f in functions(s) if num_parameters(f) > MAX_PARAMETERS]


if __name__ == "__main__":
    print(figures())
    for argument in sys.argv[1:]:
        if argument == "--lower":
            LIMITS.write_text(lowered(LIMITS.read_text()))
        else:
            print("\n".join(words_by_room().get(argument, [f"{argument}: no such words"])))
