"""The Jinja environment of templates that strangers wrote: what a render may take is counted while it runs.

A sandbox keeps a template from our objects, not from our processor and memory. Here every round of a loop,
every call, filter, operator and output spends from one allowance of characters and of the thread's processor
time; what would make something huge in one go is refused before it is made. Owns these bounds; the words that
templates know are `chat_template`'s. Specification: rulings "Text".
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from typing import Any, Final, cast

import jinja2
import jinja2.nodes
import jinja2.runtime
import jinja2.sandbox
import jinja2.visitor

from loraplex.core.limits import (
    MAX_TEMPLATE_CHARS_MADE,
    MAX_TEMPLATE_NUMBER_BITS,
    MAX_TEMPLATE_TIME_S,
    MAX_TEMPLATE_WIDTH,
)

_ROUND: Final = 16
_TEXT_OF_ALL: Final = frozenset(
    {"do_join", "join", "sync_do_join", "soft_str", "_tojson", "do_format", "format", "do_string"}
)
"""Filters and methods that write out all that they are given."""
_WIDTH: Final = re.compile(r"\d{5,}")


class TemplateLimit(jinja2.TemplateError):
    """The template takes more than a stranger's may."""


class _Allowance:
    """What one render may still take."""

    def __init__(self) -> None:
        self._chars = MAX_TEMPLATE_CHARS_MADE
        self._until = time.thread_time() + MAX_TEMPLATE_TIME_S

    def spend(self, chars: int) -> None:
        self._chars -= _ROUND + chars
        if self._chars < 0:
            raise TemplateLimit(f"it makes more than {MAX_TEMPLATE_CHARS_MADE} characters")
        if time.thread_time() > self._until:
            raise TemplateLimit(f"it takes more than {MAX_TEMPLATE_TIME_S} s")


_ALLOWANCE: ContextVar[_Allowance | None] = ContextVar("allowance", default=None)


@contextmanager
def allowance() -> Iterator[None]:
    """One render's bounds."""
    token = _ALLOWANCE.set(_Allowance())
    try:
        yield
    finally:
        _ALLOWANCE.reset(token)


def _spend(chars: int = 0) -> None:
    current = _ALLOWANCE.get()
    if current is not None:  # None while a template is compiled: constants are folded then
        current.spend(chars)


class BoundedEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """A sandbox whose templates spend from the render's `allowance`."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(finalize=_finalize, optimized=False, **options)

    def bound_filters(self) -> None:
        """Have every filter of today count; to be called once all are there."""
        for name in _LEFT_OUT:
            self.filters.pop(name, None)
            self.globals.pop(name, None)
        self.filters.update({name: _bounded(function) for name, function in self.filters.items()})
        self.filters[_COUNTED] = _counted
        self.filters[_JOINED] = _joined

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        return _Counting(self).visit(super()._parse(source, name, filename))  # type: ignore[no-any-return]

    def call(  # type: ignore[override]
        self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any
    ) -> Any:
        """A call, of which the arguments and the result are counted."""
        if isinstance(obj, jinja2.runtime.Macro):
            _spend(self.data_chars)
        owner = getattr(obj, "__self__", None)
        _check(getattr(obj, "__name__", ""), (owner, *args, *kwargs.values()))
        return _counted_result(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """An operator whose result may outgrow what it is given."""
        _check_operator(operator, left, right)
        return _counted_result(super().call_binop(context, operator, left, right))

    data_chars: int = 0
    """Characters of text that the template itself holds; a macro may write them all."""


_LEFT_OUT: Final = ("wordwrap", "urlize", "pprint", "xmlattr", "striptags", "random", "lipsum")
"""Words of Jinja that lay out pages; some take long for one long word."""
_COUNTED: Final = "counted by the sandbox"
_JOINED: Final = "joined by the sandbox"


class _Counting(jinja2.visitor.NodeTransformer):
    """Has loops and concatenations go through filters that count; their names are none that a template can
    write.
    """

    def __init__(self, environment: BoundedEnvironment) -> None:
        self._environment = environment

    def visit_Template(self, node: jinja2.nodes.Template) -> jinja2.nodes.Node:
        self._environment.data_chars = _data_chars(node)
        return self.generic_visit(node)

    def visit_For(self, node: jinja2.nodes.For) -> jinja2.nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not run", node.lineno)
        chars = jinja2.nodes.Const(sum(map(_data_chars, node.body)), lineno=node.lineno)
        node.iter = self._filter(_COUNTED, node.iter, [chars])
        return self.generic_visit(node)

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Node:
        parts = jinja2.nodes.List(list(node.nodes), lineno=node.lineno, environment=self._environment)
        return self.generic_visit(self._filter(_JOINED, parts, []))

    def _filter(
        self, name: str, value: jinja2.nodes.Node, arguments: list[jinja2.nodes.Expr]
    ) -> jinja2.nodes.Filter:
        for argument in arguments:
            argument.set_environment(self._environment)
        return jinja2.nodes.Filter(
            cast("jinja2.nodes.Expr", value),
            name,
            arguments,
            [],
            None,
            None,
            lineno=value.lineno,
            environment=self._environment,
        )


def _data_chars(node: jinja2.nodes.Node) -> int:
    return sum(len(data.data) for data in node.find_all(jinja2.nodes.TemplateData))


def _counted(value: Iterable[Any], chars: int) -> Iterator[Any]:
    for item in value:
        _spend(chars)
        yield item


def _joined(parts: Iterable[Any]) -> str:
    items = list(parts)
    _spend(_weight(items))
    return "".join(map(str, items))


def _finalize(value: Any) -> Any:
    _spend(_weight(value))
    return value


def _counted_result(value: Any) -> Any:
    _spend(len(value) if isinstance(value, str | list | tuple | dict) else 0)
    return value


def _weight(value: Any) -> int:
    """About how many characters the text of a value has; what is shared within it counts wherever it
    stands.
    """
    total, stack = 0, [value]
    while stack and total <= MAX_TEMPLATE_CHARS_MADE:
        item = stack.pop()
        total += len(item) if isinstance(item, str) else _ROUND
        if isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list | tuple):
            stack.extend(item)
    return total


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are counted; what Jinja passes besides is left alone."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        _check(getattr(function, "__name__", ""), (*args, *kwargs.values()))
        return _counted_result(function(*args, **kwargs))

    return run


def _check(name: str, values: tuple[Any, ...]) -> None:
    """Refuse what makes something huge of small arguments: widths, formats, replacements, repeated joins."""
    texts = [value for value in values if isinstance(value, str)]
    _spend(_weight(values) // _ROUND if name not in _TEXT_OF_ALL else _weight(values))
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_TEMPLATE_WIDTH:
            raise TemplateLimit(f"it asks for {value!r:.20}, at most {MAX_TEMPLATE_WIDTH} are made at a time")
    if "format" in name and any(_WIDTH.search(text) for text in texts):
        raise TemplateLimit("it formats to a width of five digits or more")
    if "replace" in name and len(texts) > 2:
        old, new = texts[1], texts[2]
        _spend(texts[0].count(old) * len(new))
    if "indent" in name and texts:
        _spend(texts[0].count("\n") * max((v for v in values if isinstance(v, int)), default=4))
    if "join" in name:
        items = sum(len(value) for value in values if isinstance(value, list | tuple))
        _spend(items * max(map(len, texts), default=0))


def _check_operator(operator: str, left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        if operator == "*" and isinstance(other, int) and isinstance(one, str | list | tuple):
            _spend(_weight(one) * max(other, 0))
    if operator == "%" and isinstance(left, str):
        _spend(_weight(right) * left.count("%"))
    if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
        raise TemplateLimit("it formats to a width of five digits or more")
    if operator == "%" and isinstance(left, str) and "*" in left:
        raise TemplateLimit("it formats to a width that is an argument")
    if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * abs(right) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_TEMPLATE_NUMBER_BITS:
            raise TemplateLimit(f"it makes a number of {bits} bits")
