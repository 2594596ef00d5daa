"""Names and signatures of a package, read from the source in its wheel by `ast`; nothing of it is imported.

A symbol is written `module:Class.member`, or `module|older_module:...` where it has moved. A callable yields its
parameters, optional ones with a trailing `=`; a class its fields, or the parameters of `__init__` if it declares none.
"""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.resources.abc import Traversable

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign
METHODS = ("get", "post", "put", "delete", "api_route")


class Sources:
    """The modules under `root`, a folder or a zip."""

    def __init__(self, root: Traversable) -> None:
        self.root = root
        self.tree = cache(self._tree)

    def signature(self, symbol: str) -> list[str] | None:
        """Parameters of a callable, fields of a class, the words of a tuple, [] for anything else, None for nothing."""
        module, _, path = symbol.partition(":")
        places = (self._find(place, path.split(".")[0]) for place in module.split("|"))
        definition = next((place for place in places if place), None)
        for name in path.split(".")[1:]:
            definition = self._member(*definition, name) if definition else None
        if definition is None:
            return None
        if not isinstance(definition[1], ast.ClassDef):
            return _parameters(definition[1])
        fields, made_by = self._fields(*definition), self._member(*definition, "__init__")
        return fields or (_parameters(made_by[1]) if made_by else [])

    def fields_under(self, folder: str) -> list[str]:
        """The annotated fields of all classes under a package."""
        trees = [self.tree(module) for module in self._modules(folder)]
        classes = [node for tree in trees for node in ast.walk(tree or ast.Module([], []))]
        return [name for node in classes if isinstance(node, ast.ClassDef) for name in _annotated(node)]

    def has_folder(self, folder: str) -> bool:
        return self.root.joinpath(*folder.split(".")).is_dir()

    def routes(self, folder: str) -> dict[str, list[str]]:
        """Path -> names that its handler reads of body and query, for every decorated handler under a package."""
        names_by_route: dict[str, set[str]] = {}
        for module in self._modules(folder):
            for node in ast.walk(self.tree(module) or ast.Module([], [])):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    for route in _routes_of(node):
                        names_by_route.setdefault(route, set()).update(self._read_by(module, node))
        return {route: sorted(names) for route, names in sorted(names_by_route.items())}

    def _tree(self, module: str) -> ast.Module | None:
        at = self._at(module)
        return ast.parse(at.read_text(encoding="utf-8")) if at else None

    def _at(self, module: str) -> Traversable | None:
        *folders, last = module.split(".")
        place = self.root.joinpath(*folders) if folders else self.root
        for at in (place / f"{last}.py", place / last / "__init__.py"):
            if at.is_file():
                return at
        return None

    def _modules(self, folder: str) -> Iterator[str]:
        place = self.root.joinpath(*folder.split("."))
        for entry in sorted(place.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from self._modules(f"{folder}.{entry.name}")
            elif entry.name.endswith(".py"):
                name = entry.name.removesuffix(".py")
                yield folder if name == "__init__" else f"{folder}.{name}"

    def _find(self, module: str, name: str, depth: int = 6) -> tuple[str, Definition] | None:
        """Where a module has a name from, following its imports: the module that defines it and the definition."""
        tree = self.tree(module)
        if tree is None or not depth:
            return None
        for node in tree.body:
            if name in _defined(node):
                other = node.value.id if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) else name
                return (self._find(module, other, depth - 1) if other != name else None) or (module, node)  # type: ignore[return-value]
        at = self._at(module)
        is_package = at is not None and at.name == "__init__.py"
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                source = _absolute(module, node, is_package)
                for alias in node.names:
                    theirs = name if alias.name == "*" else alias.name
                    is_it = alias.name == "*" or (alias.asname or alias.name) == name
                    if is_it and (definition := self._find(source, theirs, depth - 1)):
                        return definition
        return None

    def _member(self, module: str, owner: Definition, name: str) -> tuple[str, Definition] | None:
        """A member of a class or of its bases; attributes that a method sets on self, too."""
        if not isinstance(owner, ast.ClassDef):
            return None
        for node in owner.body:
            if name in _defined(node):
                return module, node  # type: ignore[return-value]
        for node in ast.walk(owner):
            if isinstance(node, ast.Assign | ast.AnnAssign) and name in _set_on_self(node):
                return module, node
        for base in owner.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            definition = self._find(module, base.id) if isinstance(base, ast.Name) else None
            if definition and (member := self._member(*definition, name)):
                return member
        return None

    def _fields(self, module: str, owner: Definition) -> list[str]:
        """The annotated fields of a class and its bases, those of the class first."""
        if not isinstance(owner, ast.ClassDef):
            return []
        names = _annotated(owner)
        for base in owner.bases:
            if isinstance(base, ast.Name) and (definition := self._find(module, base.id)):
                names += [name for name in self._fields(*definition) if name not in names]
        return names

    def _read_by(self, module: str, handler: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        names: set[str] = set()
        for argument in (*handler.args.args, *handler.args.kwonlyargs):
            annotated = {n.id for n in ast.walk(argument.annotation or ast.Constant(None)) if isinstance(n, ast.Name)}
            bodies = [
                definition
                for name in annotated
                if (definition := self._find(module, name)) and self._fields(*definition)
            ]
            names |= {argument.arg}.union(*(self._fields(*body) for body in bodies))
        for node in ast.walk(handler):
            asked = node.args[:1] if isinstance(node, ast.Call) and _is_get(node.func) else []
            asked += [node.slice] if isinstance(node, ast.Subscript) else []
            names |= {n.value for n in asked if isinstance(n, ast.Constant) and isinstance(n.value, str)}
        return names


def _annotated(owner: ast.ClassDef) -> list[str]:
    return [n.target.id for n in owner.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]


def _parameters(node: Definition) -> list[str]:
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple):
        return [n.value for n in node.value.elts if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return []
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    required = len(plain) - len(args.defaults)
    names = [arg.arg + "=" * (number >= required) for number, arg in enumerate(plain)]
    names += [arg.arg + "=" * (default is not None) for arg, default in zip(args.kwonlyargs, args.kw_defaults)]
    names += [f"*{args.vararg.arg}"] if args.vararg else []
    names += [f"**{args.kwarg.arg}"] if args.kwarg else []
    return [name for name in names if name not in ("self", "cls")]


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _set_on_self(node: ast.Assign | ast.AnnAssign) -> list[str]:
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [
        t.attr
        for target in targets
        for t in ast.walk(target)
        if isinstance(t, ast.Attribute) and isinstance(t.value, ast.Name) and t.value.id == "self"
    ]


def _absolute(module: str, node: ast.ImportFrom, is_package: bool) -> str:
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    parts = parts[: len(parts) - node.level + is_package]
    return ".".join(parts + ([node.module] if node.module else []))


def _routes_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and isinstance(decorator.func, ast.Attribute):
            first = decorator.args[0] if decorator.args else None
            if decorator.func.attr in METHODS and isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield first.value


def _is_get(func: ast.expr) -> bool:
    return isinstance(func, ast.Attribute) and func.attr in ("get", "getlist", "pop")
