"""The rules of the repository that no linter has, kept as tests.

Each rule is a function from source text to sentences. It runs over the whole repository, and over a small
sample that breaks it, so that a rule which has gone blind is noticed.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from loraplex.core.plan import PLAN_FORMAT, RESULT_FORMAT
from tests.asserting import Sources

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = sorted((ROOT / "src").rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
PURE = ("core", "identity", "engine", "schedule", "memory")

MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 100  # a device kernel takes one argument a line and cannot be split freely
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX)\b")
VAGUE_NAME = re.compile(r"(^|_)(utils?|helpers?)$")

Rule = Callable[[str], list[str]]


def may_print(path: Path) -> bool:
    """Only what talks to a terminal prints: the command line and the benchmarks."""
    parts = path.relative_to(ROOT / "src" / "loraplex").parts
    return parts[0] in ("cli.py", "bench") or parts[-1].endswith("_commands.py")


def is_pure(path: Path) -> bool:
    return path.relative_to(ROOT / "src" / "loraplex").parts[0] in PURE


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def long_file(source: str) -> list[str]:
    count = len(source.splitlines())
    return [f"{count} lines, limit {MAX_FILE_LINES}"] if count >= MAX_FILE_LINES else []


def long_functions(source: str) -> list[str]:
    found = []
    for node in functions(ast.parse(source)):
        count = (node.end_lineno or node.lineno) - node.lineno + 1
        limit = MAX_KERNEL_LINES if node.name.endswith("_kernel") else MAX_FUNCTION_LINES
        if count >= limit:
            found.append(f"line {node.lineno}: {node.name} has {count} lines, limit {limit}")
    return found


def no_docstring(source: str) -> list[str]:
    return [] if ast.get_docstring(ast.parse(source)) else ["no module docstring"]


def unfinished(source: str) -> list[str]:
    return [
        f"line {n}: {line.strip()}"
        for n, line in enumerate(source.splitlines(), 1)
        if UNFINISHED.search(line)
    ]


def prints(source: str) -> list[str]:
    return [
        f"line {node.lineno}: print() in library code"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]


def _catches_everything(handler: ast.ExceptHandler) -> bool:
    caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(isinstance(node, ast.Name) and node.id in ("Exception", "BaseException") for node in caught)


def _does_nothing(body: list[ast.stmt]) -> bool:
    return all(
        isinstance(node, ast.Pass | ast.Continue)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in body
    )


def _suppresses_everything(call: ast.Call) -> bool:
    named = {ast.unparse(argument) for argument in call.args}
    return ast.unparse(call.func).split(".")[-1] == "suppress" and bool(
        named & {"Exception", "BaseException"}
    )


def swallowed(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler):
            if node.type is None:
                found.append(f"line {node.lineno}: bare except")
            elif _catches_everything(node) and _does_nothing(node.body):
                found.append(f"line {node.lineno}: every exception is swallowed")
        elif isinstance(node, ast.Call) and _suppresses_everything(node):
            found.append(f"line {node.lineno}: every exception is suppressed")
    return found


def numpy_random(source: str) -> list[str]:
    """numpy may be used by the deterministic parts; its generators may not, and import contracts cannot see
    them.
    """
    found = []
    for node in ast.walk(ast.parse(source)):
        named = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
        imported = isinstance(node, ast.ImportFrom) and (
            (node.module or "").startswith("numpy.random")
            or (node.module == "numpy" and any(alias.name == "random" for alias in node.names))
        )
        if named in ("np.random", "numpy.random") or imported:
            found.append(
                f"line {getattr(node, 'lineno', '?')}: numpy.random in a deterministic part; use the Rng port"
            )
    return found


def sleeps(source: str) -> list[str]:
    """Waiting by the clock makes a test slow or flaky; wait for the event instead."""
    found = []
    for node in ast.walk(ast.parse(source)):
        called = ast.unparse(node.func) if isinstance(node, ast.Call) else ""
        imported = (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and any(a.name == "sleep" for a in node.names)
        )
        if called == "time.sleep" or imported:
            found.append(f"line {getattr(node, 'lineno', '?')}: a test sleeps")
    return found


def busy_waits(source: str) -> list[str]:
    """A loop that only asks again takes the processor from what it waits for; `tests/waiting.py` pauses
    between questions.
    """

    def only_asks(body: list[ast.stmt]) -> bool:
        """Nothing stands in it, or one statement that takes what is awaited."""
        alone = len(body) == 1 and isinstance(body[0], ast.Assign)
        return _does_nothing(body) or (alone and any(isinstance(n, ast.Await) for n in ast.walk(body[0])))

    return [
        f"line {node.lineno}: a loop asks again without a pause"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.While) and only_asks(node.body)
    ]


def imports_from_tests(source: str) -> list[str]:
    """What several tests need lives in a helper module. Programs that a test keeps in a string are
    read too.
    """
    named = [
        (node.lineno, f"{getattr(node, 'module', '')}.{alias.name}")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    ]
    written = re.compile(r"\bfrom (tests\.[\w.]+) import")
    named += [(n, m[1]) for n, line in enumerate(source.splitlines(), 1) for m in written.finditer(line)]
    return [
        f"line {number}: a test file is imported"
        for number, name in named
        if re.match(r"\.?tests\..*\btest_", name)
    ]


def forgetful_waits(source: str) -> list[str]:
    """`asyncio.wait_for` may swallow a cancellation that comes as its work ends; psutil's wait takes exit
    statuses.
    """
    instead = {
        "asyncio.wait_for": "asyncio.timeout",
        "psutil.wait_procs": "tests.waiting.until_gone",
    }
    return [
        f"line {node.lineno}: {ast.unparse(node.func)}; use {instead[ast.unparse(node.func)]}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in instead
    ]


TABLES = {s.name for s in (*PLAN_FORMAT.sections, *RESULT_FORMAT.sections) if s.columns is not None}


def _is_number(index: ast.expr) -> bool:
    """3, -1, or a slice with such a bound."""
    if isinstance(index, ast.Slice):
        return any(bound is not None and _is_number(bound) for bound in (index.lower, index.upper))
    if isinstance(index, ast.UnaryOp):
        return _is_number(index.operand)
    return isinstance(index, ast.Constant) and isinstance(index.value, int)


def numbered_columns(source: str) -> list[str]:
    """`core/plan.py` alone knows where a column lies: `plan.requests.rows`, never the number."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Tuple)):
            continue
        section = ast.unparse(node.value).removesuffix(".array").rpartition(".")[2]
        if section in TABLES and any(_is_number(index) for index in node.slice.elts[1:]):
            found.append(f"line {node.lineno}: {ast.unparse(node)}; name the column")
    return found


def readme_faults(text: str) -> list[str]:
    found = []
    for number, block in enumerate(re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL), 1):
        try:
            ast.parse(block)
        except SyntaxError as error:
            found.append(f"python block {number}, its line {error.lineno}: {error.msg}")
    return found


def report(rule: Rule, paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {fault}"
        for path in paths
        for fault in rule(path.read_text(encoding="utf-8"))
    ]


RULES: list[tuple[Rule, list[Path], str]] = [
    (long_file, LIBRARY, "x = 1\n" * MAX_FILE_LINES),
    (long_functions, LIBRARY, "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    (no_docstring, LIBRARY + TESTS, "x = 1\n"),
    (unfinished, LIBRARY, "x = 1  # TO" + "DO: finish\n"),
    (prints, [path for path in LIBRARY if not may_print(path)], "print(1)\n"),
    (swallowed, LIBRARY, "try:\n    f()\nexcept:\n    g()\n"),
    (swallowed, LIBRARY, "try:\n    f()\nexcept Exception:\n    pass\n"),
    (swallowed, LIBRARY, "try:\n    f()\nexcept (ValueError, BaseException):\n    ...\n"),
    (swallowed, LIBRARY, "with contextlib.suppress(Exception):\n    f()\n"),
    (
        numpy_random,
        [path for path in LIBRARY if is_pure(path)],
        "import numpy as np\nnp.random.default_rng(0)\n",
    ),
    (numpy_random, [path for path in LIBRARY if is_pure(path)], "from numpy.random import default_rng\n"),
    (sleeps, TESTS, "import time\ntime.sleep(1)\n"),
    (sleeps, TESTS, "from time import sleep\n"),
    (busy_waits, TESTS, "while not holds():\n    pass\n"),
    (busy_waits, TESTS, "while status == 503:\n    status = (await client.get('/ready')).status_code\n"),
    (imports_from_tests, LIBRARY + TESTS, "from tests.model.te" + "st_pages import owned_bytes\n"),
    (imports_from_tests, LIBRARY + TESTS, "from tests.model import test_pages\n"),
    (imports_from_tests, LIBRARY + TESTS, "PROGRAM = 'from tests.te" + "st_cli import main'\n"),
    (imports_from_tests, LIBRARY + TESTS, "import tests.te" + "st_cli\n"),
    (forgetful_waits, LIBRARY + TESTS, "await asyncio.wait_for(f(), 1)\n"),
    (forgetful_waits, LIBRARY + TESTS, "psutil.wait_procs([p], timeout=20)\n"),
    (
        numbered_columns,
        [path for path in LIBRARY if path.parts[-2:] != ("core", "plan.py")],
        "plan.requests[:, 5]\n",
    ),
    (numbered_columns, TESTS, "samples[index, -1]\n"),
    (numbered_columns, TESTS, "result.copied.array[..., 0:2]\n"),
    (readme_faults, [ROOT / "README.md"], "```python\nx = = 1\n```\n"),
]


@pytest.mark.parametrize(("rule", "paths", "sample"), RULES)
def test_rule_holds_and_can_fail(rule: Rule, paths: list[Path], sample: str) -> None:
    assert rule(sample), f"{rule.__name__} no longer sees its sample"
    assert paths, f"{rule.__name__} looks at no file"
    assert report(rule, paths) == []


def test_a_tidy_sample_breaks_no_rule() -> None:
    sample = (
        '"""Owns x."""\n\ndef f():\n    try:\n        g(plan.requests.rows[:3])\n'
        "    except ValueError:\n        pass\n"
    )
    for rule in (
        long_file,
        long_functions,
        no_docstring,
        unfinished,
        prints,
        swallowed,
        numpy_random,
        sleeps,
        busy_waits,
        imports_from_tests,
        forgetful_waits,
        numbered_columns,
    ):
        assert rule(sample) == []


BLIND = "def test_x():\n    helper()\n"
SEEING = "def helper():\n    assert 1\n\ndef append():\n    assert 1\n"
RIGS = (
    "class Quiet:\n    def check(self):\n        f()\n\n"
    "class Loud(Quiet):\n    def check(self):\n        assert 1\n"
)


@pytest.mark.parametrize(
    ("test", "silent"),
    [
        (BLIND, True),
        ("from tests.seeing import helper\n" + BLIND, False),
        ("import tests.seeing as s\ndef test_x():\n    s.helper()\n", False),
        ("from tests.rigs import helper\n" + BLIND, True),  # another one of that name
        ("from tests.seeing import helper\ndef test_x():\n    helper = f\n    helper()\n", True),
        ("from tests.seeing import append\ndef test_x():\n    seen = []\n    seen.append(f())\n", True),
        ("from tests.rigs import Loud, Quiet\ndef test_x(rig: Loud):\n    rig.check()\n", False),
        ("from tests.rigs import Loud, Quiet\ndef test_x(rig: Quiet):\n    rig.check()\n", True),
        ("from tests.rigs import Loud, Quiet\ndef test_x():\n    rig = Quiet()\n    rig.check()\n", True),
        ("from tests.seeing import helper\ndef test_x():\n    run(helper)\n", False),
        ("import pytest\ndef test_x():\n    with pytest.raises(E):\n        f()\n", False),
        ("def test_x(helper):\n    helper()\n", True),
        ("def test_x(checked):\n    checked()\n", False),
    ],
)
def test_a_planted_test_that_sees_nothing_is_found(test: str, silent: bool) -> None:
    """Names of what asserts elsewhere in the tests help it nothing."""
    fixtures = "def checked():\n    def run():\n        assert 1\n    return run\n"
    sources = {"tests.seeing": SEEING, "tests.rigs": RIGS, "tests.conftest": fixtures, "tests.test_a": test}
    assert Sources(sources).silent() == ["tests.test_a: test_x"] * silent


def test_every_test_sees_something() -> None:
    sources = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in TESTS}
    assert Sources({name: path.read_text(encoding="utf-8") for name, path in sources.items()}).silent() == []


def test_modules_are_named_after_what_they_own() -> None:
    assert VAGUE_NAME.search("page_utils")
    assert VAGUE_NAME.search("helpers")
    vague = [
        str(path.relative_to(ROOT))
        for path in LIBRARY
        if VAGUE_NAME.search(path.stem) or VAGUE_NAME.search(path.parent.name)
    ]
    assert vague == []


def imported(name: str, source: str, modules: set[str]) -> set[str]:
    """Modules that a module names in its imports, wherever these stand: inside functions and for types alone,
    too.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            inside = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= inside & modules or {str(node.module)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & (modules - {name})


def import_cycles(sources: dict[str, str]) -> list[str]:
    """Modules that import each other, through however many others: what is left when those that need none of
    the rest go.
    """
    left = {name: imported(name, source, set(sources)) for name, source in sources.items()}
    while True:
        needed = set().union(*left.values()) if left else set()
        ends = {name for name, needs in left.items() if not needs & left.keys() or name not in needed}
        if not ends:
            return sorted(left)
        left = {name: needs - ends for name, needs in left.items() if name not in ends}


def test_no_module_imports_one_that_imports_it() -> None:
    lazy = "def f():\n    from p import a\n"
    assert import_cycles({"p.a": "import p.b\n", "p.b": lazy, "p.c": "import p.a\n", "p.d": ""}) == [
        "p.a",
        "p.b",
    ]
    sources = {
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(
            ".__init__"
        ): path.read_text()
        for path in LIBRARY
    }
    assert import_cycles(sources) == []


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in LIBRARY}
    assert [
        str(folder) for folder in folders if folder.name != "src" and not (folder / "__init__.py").exists()
    ] == []


def test_importing_the_deterministic_parts_loads_no_heavy_library() -> None:
    """The import contracts read source; this is what the interpreter really does, `loraplex/__init__.py`
    included.
    """
    names = [
        ".".join(path.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__")
        for path in LIBRARY
        if path.parent.name != "src" and len(path.relative_to(ROOT / "src").parts) > 2 and is_pure(path)
    ]
    assert {f"loraplex.{part}" for part in PURE} <= set(names)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        + "".join(f"import {name}\n" for name in names)
        + "print(sorted({'torch', 'triton', 'ray', 'zmq', 'sqlalchemy', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr, done.stdout.strip()) == (0, "", "[]")


NOBODY_CALLS = {
    "catalog.catalog_commands.check_catalog": "a command of the command line",
    "cli.sim": "a command of the command line",
    "core.layout.page_demand": (
        "0x04D derives demand for three geometries; tests compare it with what images take"
    ),
    "identity.manifest.encode_manifest": "writes what `loraplex verify --manifest` reads",
    "ops.exact.ExactOps": "the definition that every operator family is compared with",
    "ops.exact.read_adapter": "what the definition reads",
    "ops.ledger.rank_ledger": "0x06B's padded over true rank",
}
"""Public functions and classes that nothing under src names, each with the reason why it stands there."""


def names_used(top: ast.stmt) -> set[str]:
    """What a statement at the top of a module names; `module:function` in a string counts, its own name does
    not.
    """
    found = set()
    for node in ast.walk(top):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name):
                found.add(name)
            case ast.Constant(value=str(text)) if re.fullmatch(r"loraplex[\w.]*:\w+", text):
                found.add(text.rpartition(":")[2])
    return found - {getattr(top, "name", "")}


def unused_definitions(sources: dict[str, str]) -> list[str]:
    """Public functions and classes of modules that no statement of any module names, except their own."""
    bodies = {module: ast.parse(source).body for module, source in sources.items()}
    used = set().union(*(names_used(top) for body in bodies.values() for top in body))
    return [
        f"{module}.{top.name}"
        for module, body in bodies.items()
        for top in body
        if isinstance(top, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not top.name.startswith("_")
        and top.name not in used
    ]


def test_code_that_only_tests_call_stands_with_the_tests() -> None:
    planted = {
        "p.a": "from p.b import used\n\ndef lonely():\n    return lonely()\n\nused()\n",
        "p.b": "def used(): ...\nclass Alone: ...\ndef started(): ...\nSTART = 'loraplex.p.b:started'\n",
    }
    assert unused_definitions(planted) == ["p.a.lonely", "p.b.Alone"]
    sources = {
        ".".join(path.relative_to(ROOT / "src" / "loraplex").with_suffix("").parts): path.read_text()
        for path in LIBRARY
    }
    assert sorted(unused_definitions(sources)) == sorted(NOBODY_CALLS)


def repeated_names(paths: list[str]) -> list[str]:
    """File names that stand in two folders; `__init__.py` must."""
    names = [path.rpartition("/")[2] for path in paths]
    return sorted({name for name in names if names.count(name) > 1 and name != "__init__.py"})


def test_no_two_files_of_the_library_have_one_name() -> None:
    assert repeated_names(["a/__init__.py", "b/__init__.py", "a/x.py", "b/c/x.py", "b/y.py"]) == ["x.py"]
    assert repeated_names([str(path) for path in LIBRARY]) == []
