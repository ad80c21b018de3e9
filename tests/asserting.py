"""Finds tests that see nothing: neither they nor any function of the tests that they call, however far,
asserts anything.

A name means what the imports of its module say, and a method what the class of its object has. A method of an
object whose class the source does not tell, by an annotation or where it is made, counts for nothing.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field

Function = ast.FunctionDef | ast.AsyncFunctionDef
Place = tuple[str, str]
"""A module, and a function, a class or a method (`Class.method`) in it."""

ASSERTING = frozenset(
    {
        "pytest.raises",
        "pytest.warns",
        "pytest.fail",
        "torch.testing.assert_close",
        "numpy.testing.assert_allclose",
        "numpy.testing.assert_array_equal",
    }
)
ENTERED = ("__init__", "__post_init__", "__call__", "__enter__", "__exit__", "__aenter__", "__aexit__")


@dataclass
class Module:
    """What the names of a module mean. classes: methods and the names of bases."""

    name: str
    imports: dict[str, str] = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, name: str, source: str) -> Module:
        made, tree = cls(name), ast.parse(source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    made.imports[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    made.imports[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        for node in tree.body:
            match node:
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    made.functions[node.name] = node
                case ast.ClassDef():
                    made.classes[node.name] = [ast.unparse(base) for base in node.bases]
                    for inner in node.body:
                        if isinstance(inner, Function):
                            made.functions[f"{node.name}.{inner.name}"] = inner
                case ast.Assign(targets=[ast.Name(id=bound)], value=value):
                    made._note_importorskip(bound, value)
        return made

    def _note_importorskip(self, bound: str, value: ast.expr) -> None:
        match value:
            case ast.Call(func=ast.Attribute(attr="importorskip"), args=[ast.Constant(value=str(name))]):
                self.imports[bound] = name


class Sources:
    """Modules of tests by name, and which of their functions assert."""

    def __init__(self, sources: dict[str, str]) -> None:
        self.modules = {name: Module.read(name, source) for name, source in sources.items()}

    def silent(self) -> list[str]:
        """Names of the tests that assert nothing."""
        callers: dict[Place, set[Place]] = defaultdict(set)
        seeing: set[Place] = set()
        for module in self.modules.values():
            for qualified, node in module.functions.items():
                place = (module.name, qualified)
                called = set(self.called(module, qualified, node))
                if any(isinstance(inner, ast.Assert) for inner in ast.walk(node)) or called & OUTSIDE:
                    seeing.add(place)
                for target in called:
                    callers[target].add(place)
        fresh = seeing
        while fresh:
            fresh = {caller for place in fresh for caller in callers[place]} - seeing
            seeing |= fresh
        return sorted(
            f"{module.name}: {qualified}"
            for module in self.modules.values()
            for qualified in module.functions
            if qualified.rpartition(".")[2].startswith("test_") and (module.name, qualified) not in seeing
        )

    def called(self, module: Module, qualified: str, node: Function) -> Iterator[Place]:
        """What a function calls, or hands to what it calls."""
        scope = Scope(self, module, qualified.rpartition(".")[0], node)
        for call in ast.walk(node):
            if isinstance(call, ast.Call):
                for expression in (call.func, *call.args, *(keyword.value for keyword in call.keywords)):
                    yield from scope.meant(expression)

    def find(self, dotted: str) -> Iterator[Place]:
        """A dotted name as what can be called: a function, or the methods that making and entering an object
        call.
        """
        if dotted in ASSERTING:
            yield ("", dotted)
        module_name, _, name = dotted.rpartition(".")
        module = self.modules.get(module_name)
        if module is None:
            return
        if name in module.functions:
            yield (module_name, name)
        elif name in module.classes:
            for method in ENTERED:
                yield from self.method(module_name, name, method)
        elif name in module.imports:
            yield from self.find(module.imports[name])

    def class_of(self, dotted: str) -> Place | None:
        """Where a class of the tests is defined, through whatever imports."""
        module_name, _, name = dotted.rpartition(".")
        module = self.modules.get(module_name)
        if module is None:
            return None
        if name in module.classes:
            return module_name, name
        return self.class_of(module.imports[name]) if name in module.imports else None

    def method(self, module_name: str, class_name: str, method: str) -> Iterator[Place]:
        """A method where the class or the first base that has it defines it."""
        module = self.modules[module_name]
        if f"{class_name}.{method}" in module.functions:
            yield (module_name, f"{class_name}.{method}")
            return
        for base in module.classes[class_name]:
            found = self.class_of(module.imports.get(base, f"{module_name}.{base}"))
            if found:
                yield from self.method(*found, method)


OUTSIDE = frozenset(("", name) for name in ASSERTING)


class Scope:
    """What names mean inside one function."""

    def __init__(self, tests: Sources, module: Module, class_name: str, node: Function) -> None:
        self.tests, self.module, self.class_name = tests, module, class_name
        self.classes: dict[str, Place] = {}
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self.arguments = {argument.arg for argument in arguments}
        self.bound = self.arguments | {
            inner.id
            for inner in ast.walk(node)
            if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store)
        }
        self.bound |= {inner.name for inner in ast.walk(node) if isinstance(inner, Function)} - {node.name}
        for inner in ast.walk(node):
            match inner:
                case ast.arg(arg=name, annotation=ast.expr() as annotation):
                    self._note(name, annotation)
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=made)):
                    self._note(name, made)
                case ast.withitem(context_expr=ast.Call(func=made), optional_vars=ast.Name(id=name)):
                    self._note(name, made)

    def _note(self, name: str, expression: ast.expr) -> None:
        """The class of a variable: an annotation, or what was called to make it."""
        dotted = self.dotted(expression)
        found = self.tests.class_of(dotted) if dotted else None
        if found:
            self.classes[name] = found

    def dotted(self, expression: ast.expr) -> str | None:
        """A name of the module, with its module; nothing for what is bound inside the function."""
        match expression:
            case ast.Name(id=name):
                if name in self.module.functions or name in self.module.classes:
                    return f"{self.module.name}.{name}"
                return self.module.imports.get(name)
            case ast.Attribute(value=value, attr=attr):
                base = self.dotted(value)
                return f"{base}.{attr}" if base else None
        return None

    def meant(self, expression: ast.expr) -> Iterator[Place]:
        """The functions that an expression may stand for where it is called."""
        root = expression
        while isinstance(root, ast.Attribute):
            root = root.value
        local = isinstance(root, ast.Name) and root.id in self.bound
        dotted = None if local else self.dotted(expression)
        if dotted and (found := [*self.tests.find(dotted)]):
            yield from found
        elif isinstance(expression, ast.Name) and expression.id in self.arguments:
            yield from self._fixture(expression.id)
        elif isinstance(expression, ast.Attribute):
            yield from self._method(expression.value, expression.attr)

    def _fixture(self, name: str) -> Iterator[Place]:
        """A fixture of the module, or of a conftest of its folder or above it."""
        parts = self.module.name.split(".")[:-1]
        places = [self.module.name] + [".".join([*parts[: n + 1], "conftest"]) for n in range(len(parts))]
        for place in places:
            if place in self.tests.modules and name in self.tests.modules[place].functions:
                yield (place, name)

    def _method(self, value: ast.expr, name: str) -> Iterator[Place]:
        known: Place | None = None
        if isinstance(value, ast.Name):
            own = (self.module.name, self.class_name) if value.id == "self" and self.class_name else None
            known = own or self.classes.get(value.id)
        elif isinstance(value, ast.Call) and (dotted := self.dotted(value.func)):
            known = self.tests.class_of(dotted)
        if known:
            yield from self.tests.method(*known, name)
