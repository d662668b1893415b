"""Jinja for templates that are not trusted: no way to Python, and bounded time and memory.

Jinja's immutable sandbox keeps a template from reaching Python; it knows no bound on time or memory. Here both are
bounded without a thread or a process: every step a template can repeat (a loop's turn, a call, a filter, an operator,
an output) is counted and looks at the clock; every value it can build is measured, containers with all they contain,
so that none is larger than `MAX_VALUE`; and the built-ins that could make much from little in one go are checked before
they run, or absent.
"""

import contextvars
import datetime
import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Mapping
from operator import index
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_environment

from jaxrt.artifacts.files import printable
from jaxrt.errors import ArtifactError, RequestError

MAX_TEMPLATE = 1 << 17  # characters of source
MAX_TEXT = 1 << 23  # characters rendered
MAX_VALUE = 1 << 23  # size of one value: a character counts 1, an element of a container 8
MAX_WORK = 1 << 28  # sum of everything counted in one rendering
MAX_SECONDS = 1.0  # of this thread's processor time
MAX_DEPTH = 64  # containers within containers
MAX_WIDTH = 1_000  # blanks of an indentation, characters to strip, digits to round to
MAX_BITS = 4_096  # of a whole number
_ELEMENT = 8
_CONTAINERS = (dict, list, tuple, set, frozenset)
_VIEWS = (type({}.items()), type({}.keys()), type({}.values()))
_FIX = "pass the prompt as text, or another chat_template="


def render(source: str, values: Mapping[str, Any]) -> str:
    """The text of the template `source` with `values`, which are plain data. Compiled once for each source.

    Raises: ArtifactError for a template that is malformed, exceeds a bound, or reaches for what it must not have;
    RequestError for what it refuses (`raise_exception`), lacks, or does wrong with these values.
    """
    work = _WORK.set(_Work())
    try:
        return _joined(_compiled(source).generate(values))
    except (ArtifactError, RequestError):
        raise
    except SecurityError as error:
        raise _broken(f"reaches for what it must not have: {error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise _broken(f"does not parse: line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:
        raise _broken("nests or recurses too deeply") from error
    except _Refused as error:
        raise RequestError(f"the chat template refuses: {_shown(error)}", fix="change the messages") from error
    except jinja2.UndefinedError as error:
        raise RequestError(f"the chat template lacks something: {_shown(error)}", fix=_FIX) from error
    except Exception as error:  # a template may do any wrong thing: add a number to text, divide by zero, ...
        raise RequestError(f"the chat template failed: {type(error).__name__}: {_shown(error)}", fix=_FIX) from error
    finally:
        _WORK.reset(work)


def _joined(pieces: Iterable[str]) -> str:
    parts, total = [], 0
    for piece in pieces:
        parts.append(piece)
        total += len(piece)
        if total > MAX_TEXT:
            raise RequestError(
                f"the chat template renders more than {MAX_TEXT:,} characters", fix="shorten the messages, or " + _FIX
            )
    return "".join(parts)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE:
        raise _broken(f"has {len(source):,} characters, more than {MAX_TEMPLATE:,}")
    return _ENVIRONMENT.from_string(source)


def _broken(found: str) -> ArtifactError:
    return ArtifactError(printable(found, 400), field="chat template", fix=_FIX)


def _shown(error: Exception) -> str:
    return printable(str(error), 400)


class _Refused(jinja2.TemplateError):
    """What a template says through `raise_exception`."""


# What a rendering may use up


class _Work:
    """What is left of one rendering's allowance."""

    def __init__(self) -> None:
        self.left = MAX_WORK
        self.deadline = time.thread_time() + MAX_SECONDS  # this thread's own time: a busy machine fails no request


_WORK: contextvars.ContextVar[_Work] = contextvars.ContextVar("chat template work")


def _spend(amount: int) -> None:
    work = _WORK.get()
    work.left -= amount
    if work.left < 0:
        raise _broken(f"builds more than {MAX_WORK:,} characters and elements on the way")
    if time.thread_time() > work.deadline:
        raise _broken(f"takes more than {MAX_SECONDS:g} s")


def _too_large(size: int) -> None:
    if size > MAX_VALUE:
        raise _broken(f"builds a value larger than {MAX_VALUE:,} characters")


def _size(value: object) -> int:
    """Size of a value written out: shared parts count as often as they appear, as they would in text."""
    total, stack = 0, [(value, 0)]
    while stack:
        item, depth = stack.pop()
        total += len(item) if isinstance(item, str) else _ELEMENT
        if isinstance(item, _CONTAINERS):
            if depth == MAX_DEPTH:
                raise _broken(f"nests values more than {MAX_DEPTH} deep")
            children = (*item.keys(), *item.values()) if isinstance(item, dict) else item
            stack.extend((child, depth + 1) for child in children)
        _too_large(total + _ELEMENT * len(stack))
    return total


def _measured(value: Any) -> Any:
    """`value`, after counting it. A view of a dict becomes a list, which can be measured later as well."""
    if isinstance(value, _VIEWS):
        value = list(value)
    _spend(_size(value))
    return value


# The built-ins that need a look before they run


def _check_replace(text: str, old: object = "", new: object = "", *_: object) -> None:
    old, new = str(old), str(new)
    _too_large(len(text) + (text.count(old) if old else len(text) + 1) * len(new))


def _check_strip(text: str, characters: object = None, *_: object) -> None:
    if characters is not None and len(str(characters)) > MAX_WIDTH:
        raise _broken(f"strips {len(str(characters)):,} different characters")


# A width of four digits, a width from an argument, a field within a field
_PERCENT_WIDTH = re.compile(r"%(\([^)]*\))?[-+ #0-9.^_]*?([0-9]{4}|\*)")
_BRACE_WIDTH = re.compile(r"\{[^{}]*([0-9]{4}|\{)")


def _check_format(text: str, pattern: re.Pattern[str]) -> None:
    if pattern.search(text):
        raise _broken(f"formats with a width that is too large: {text}")


def _check_times(left: object, right: object) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple) and isinstance(count, int):
            _too_large(_size(value) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise _broken(f"computes a number of more than {MAX_BITS} bits")


def _check_power(left: object, right: object) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MAX_BITS:
        raise _broken(f"computes a number of more than {MAX_BITS} bits")


def _check_modulo(left: object, right: object) -> None:
    if isinstance(left, str):
        _check_format(left, _PERCENT_WIDTH)


_OPERATORS: dict[str, Callable[[object, object], None]] = {
    "*": _check_times,
    "**": _check_power,
    "%": _check_modulo,
}
_METHODS: dict[str, Callable[..., None]] = {
    "replace": _check_replace,
    "strip": _check_strip,
    "lstrip": _check_strip,
    "rstrip": _check_strip,
}
_COMPILER_ARGUMENTS = ("_loop_vars", "_block_vars")  # Jinja's own, along with every call; not the template's to keep
# Methods that make much from little, or values of types that have such methods
_REFUSED_METHODS = frozenset(
    ["center", "ljust", "rjust", "zfill", "expandtabs", "translate", "maketrans", "encode", "format_map"]
    + ["to_bytes", "from_bytes"]
)


# Filters


def _concatenate(separator: str, values: Iterable[object]) -> str:
    parts = [str(value) for value in values]
    _too_large(sum(map(len, parts)) + len(separator) * len(parts))
    return separator.join(parts)


@pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    items = map(make_attrgetter(environment, attribute), value) if attribute is not None else value
    return _concatenate(str(d), items)


def _replace(value: object, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(value), old, new)
    return str(value).replace(str(old), str(new), -1 if count is None else count)


def _trim(value: object, chars: str | None = None) -> str:
    _check_strip(str(value), chars)
    return str(value).strip(chars)


def _format(value: object, *arguments: Any, **named: Any) -> str:
    _check_format(str(value), _PERCENT_WIDTH)
    return str(value) % (named or arguments)


def _indent(value: object, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    text = str(value)
    size = width if isinstance(width, int) else len(width)
    if size > MAX_WIDTH:
        raise _broken(f"indents by {size:,} characters")
    _too_large(len(text) + (text.count("\n") + 1) * size)
    return FILTERS["indent"](text, width, first, blank)


def _round(value: float, precision: int = 0, method: str = "common") -> float:
    if not -MAX_WIDTH < precision < MAX_WIDTH:
        raise _broken(f"rounds to {precision} digits")
    return FILTERS["round"](value, precision, method)


@pass_environment
def _sum(environment: jinja2.Environment, value: Iterable[Any], attribute: str | None = None, start: float = 0) -> Any:
    if not isinstance(start, int | float):
        raise _broken(f"sums up from a {type(start).__name__}")
    return FILTERS["sum"](environment, value, attribute, start)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as models were trained on."""
    if indent is not None and not 0 <= index(indent) <= 16:
        raise _broken(f"indents JSON by {indent}")
    encoder = json.JSONEncoder(
        ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys, allow_nan=False
    )
    if indent is None:
        return encoder.encode(value)
    pieces = []
    for piece in encoder.iterencode(value):
        _spend(len(piece))
        pieces.append(piece)
    return "".join(pieces)


# Jinja's own filters whose result is no larger than what goes in
_LINEAR_FILTERS = (
    *("abs", "attr", "capitalize", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items"),
    *("last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "reverse", "select"),
    *("selectattr", "sort", "string", "title", "truncate", "unique", "upper", "wordcount"),
)
_FILTERS: dict[str, Callable[..., Any]] = {name: FILTERS[name] for name in _LINEAR_FILTERS} | {
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "safe": str,  # nothing is escaped, so there is nothing to mark
    "sum": _sum,
    "tojson": _tojson,
    "trim": _trim,
}


def _counted(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _spend(1)
        return _measured(function(*args, **kwargs))

    return counted


# The environment


class _Namespace(Namespace):
    """Jinja's namespace; it may hold itself, so it is never written out."""

    def __repr__(self) -> str:
        return "<namespace>"


class _Generator(CodeGenerator):
    """Jinja's compiler, with a count in every loop and a measure around every expression that builds a value."""

    def visit_For(self, node: nodes.For, frame: Frame) -> None:
        # the text in the loop is counted with each turn, so that blocks cannot collect it without end
        cost = 1 + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body = [nodes.ExprStmt(_call("turn", cost, node.lineno), lineno=node.lineno), *node.body]
        if node.test is not None:
            node.test = nodes.And(_call("turn", 1, node.lineno), node.test, lineno=node.lineno)
        super().visit_For(node, frame)

    def _measure(self, visit: Callable[[Any, Frame], None], node: nodes.Expr, frame: Frame) -> None:
        self.write("environment.measured(")
        visit(node, frame)
        self.write(")")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self._measure(super().visit_List, node, frame)

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self._measure(super().visit_Dict, node, frame)

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        if node.ctx == "load":
            self._measure(super().visit_Tuple, node, frame)
        else:
            super().visit_Tuple(node, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self._measure(super().visit_Concat, node, frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        if isinstance(node.arg, nodes.Slice):
            self._measure(super().visit_Getitem, node, frame)
        else:
            super().visit_Getitem(node, frame)


def _call(name: str, argument: int, line: int) -> nodes.Call:
    return nodes.Call(
        nodes.EnvironmentAttribute(name, lineno=line),
        [nodes.Const(argument, lineno=line)],
        [],
        None,
        None,
        lineno=line,
    )


class _GenerationTag(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the model's own words for training; here it is its content."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _Environment(ImmutableSandboxedEnvironment):
    code_generator_class = _Generator
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)
    measured = staticmethod(_measured)

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _GenerationTag],
            optimized=False,  # a constant expression is worked out when it is counted
            finalize=_counted(str),
        )
        self.filters = {name: _counted(function) for name, function in _FILTERS.items()}
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals |= {
            "namespace": _Namespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def turn(self, cost: int) -> bool:
        """Called at each turn of a loop."""
        _spend(cost)
        return True

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _REFUSED_METHODS and super().is_safe_attribute(obj, attr, value)

    def unsafe_undefined(self, obj: Any, attribute: str) -> jinja2.Undefined:
        raise SecurityError(f"{attribute!r} of a {type(obj).__name__}")  # not only when it is used

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatter = super().wrap_str_format(value)
        if formatter is not None:
            _check_format(str(value.__self__), _BRACE_WIDTH)
        return formatter

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if (check := _OPERATORS.get(operator)) is not None:
            check(left, right)
        return _measured(super().call_binop(context, operator, left, right))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805
        _measured([*args, *(value for name, value in kwargs.items() if name not in _COMPILER_ARGUMENTS)])
        owner = getattr(__obj, "__self__", None)  # a foreign object: whatever the template calls
        if isinstance(owner, str):
            if __obj.__name__ == "join":
                return _measured(_concatenate(owner, *args))
            if (check := _METHODS.get(__obj.__name__)) is not None:
                check(owner, *args)
        return _measured(super().call(__context, __obj, *args, **kwargs))


def _raise_exception(message: object) -> None:
    raise _Refused(str(message))


def _strftime_now(format: str) -> str:
    _check_format(format, _PERCENT_WIDTH)
    return datetime.datetime.now().strftime(format)


_ENVIRONMENT = _Environment()
