"""Read a piece of source and write down its facts.

The interpreter's own parser does it, twenty times faster than libcst. Source in a newer syntax than
the interpreter has (a plugin for Python 3.12, read with 3.10) goes to `collect_cst`, which knows
every syntax and gives the same facts; the tests hold both against real modules. Knows syntax and
`isinstance` narrowing; must not know other modules, trees or surfaces.
"""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from vllm_drift import normal
from vllm_drift.facts import (
    Argument,
    Assignment,
    AttributeUse,
    Block,
    Call,
    Class,
    Function,
    Import,
    InstanceTest,
    Parameter,
    Read,
    Signature,
    function_kind,
)
from vllm_drift.segments import Segment, joined

__all__ = ["NotParsed", "collect", "cut_parsed", "parse_signature"]


class NotParsed(ValueError):
    """A text that no parser at hand reads. The message says where and why."""


def collect(text: str, *, in_class: bool = False) -> Block:
    """Collect the facts of statements. `in_class`: they are members of a class, maybe indented.

    Raises NotParsed.
    """
    indented = next((line for line in text.split("\n") if line.strip()), "")[:1] in (" ", "\t")
    source = f"class _:\n{text}" if indented else text
    try:
        statements = _parse(source).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        from vllm_drift.collect_cst import collect as collect_with_libcst

        return collect_with_libcst(text, in_class=in_class)
    collector = _Collector(source, shift=-1 if indented else 0, in_class=in_class)
    if indented:
        outer = statements[0]
        assert isinstance(outer, ast.ClassDef)
        statements = outer.body
    return collector.block_of(statements)


def cut_parsed(text: str) -> tuple[Segment, ...]:
    """Cut a module as `segments.cut` does, by parsing it: slow, and never wrong.

    Raises NotParsed.
    """
    try:
        statements = _parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        from vllm_drift.collect_cst import cut_parsed as cut_with_libcst

        return cut_with_libcst(text)
    return _cut_statements(text.split("\n"), statements, text.count("\n") + 2, "")


def _parse(text: str) -> ast.Module:
    with warnings.catch_warnings():
        # An escape such as "\d" in a string is no concern of ours.
        warnings.simplefilter("ignore")
        return ast.parse(text)


def _first_line(node: ast.stmt) -> int:
    decorators: Sequence[ast.expr] = getattr(node, "decorator_list", ())
    return min([node.lineno, *(d.lineno for d in decorators)])


def _cut_statements(
    lines: list[str], statements: Sequence[ast.stmt], end: int, prefix: str
) -> tuple[Segment, ...]:
    # What follows a semicolon belongs to the statement whose lines it is on.
    nodes: list[ast.stmt] = []
    for node in statements:
        if not nodes or _first_line(node) > (nodes[-1].end_lineno or 0):
            nodes.append(node)
    starts = [_first_line(node) for node in nodes]
    ends = [*starts[1:], end][: len(starts)]
    segments = []
    for node, start, after in zip(nodes, starts, ends, strict=True):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            segments.append(Segment("other", "", start, after, start, after))
            continue
        name, first = f"{prefix}{node.name}", node.body[0]
        in_one_line = bool(lines[_first_line(first) - 1][: first.col_offset].strip("@ \t\f"))
        body = after if in_one_line else _first_line(first)
        if not isinstance(node, ast.ClassDef):
            segments.append(Segment("function", name, start, after, node.lineno, body))
        else:
            members = () if in_one_line else _cut_statements(lines, node.body, after, f"{name}.")
            segments.append(Segment("class", name, start, after, node.lineno, body, members))
    return joined(segments) if prefix else tuple(segments)


def parse_signature(text: str) -> Signature:
    """Read a signature written as source text, `(self, x: int = 0, *, eager) -> bool`.

    Raises NotParsed.
    """
    return collect(f"def _{text}: ...").functions[0].signature


@dataclass
class _Frame:
    """What is being collected for one function, class or module body."""

    kind: str
    imports: list[Import] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    attributes: list[AttributeUse] = field(default_factory=list)
    tests: list[InstanceTest] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)
    reads: list[Read] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    classes: list[Class] = field(default_factory=list)
    strings: list[tuple[str, int]] = field(default_factory=list)
    bound: set[str] = field(default_factory=set)
    declared_global: set[str] = field(default_factory=set)


_Narrowed = dict[str, tuple[str, ...]]
_Definition = ast.FunctionDef | ast.AsyncFunctionDef
_Comprehension = ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp
_OPERATORS = {
    ast.Add: "+=",
    ast.Sub: "-=",
    ast.Mult: "*=",
    ast.MatMult: "@=",
    ast.Div: "/=",
    ast.FloorDiv: "//=",
    ast.Mod: "%=",
    ast.Pow: "**=",
    ast.LShift: "<<=",
    ast.RShift: ">>=",
    ast.BitAnd: "&=",
    ast.BitOr: "|=",
    ast.BitXor: "^=",
}


class _Collector:
    def __init__(self, text: str, *, shift: int, in_class: bool) -> None:
        self._lines = text.split("\n")
        # Offsets of nodes count UTF-8 bytes.
        self._encoded = None if text.isascii() else [line.encode() for line in self._lines]
        self._shift = shift
        self._frames: list[_Frame] = [_Frame("class" if in_class else "module")]
        self._saved: list[tuple[_Narrowed, set[tuple[str, str]], list[str]]] = []
        self._scope: list[str] = []
        self._conditions: list[str] = []
        self._narrowed: _Narrowed = {}
        self._guards: set[tuple[str, str]] = set()
        self._in_format: ast.JoinedStr | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            ast.FunctionDef: self._function,
            ast.AsyncFunctionDef: self._function,
            ast.ClassDef: self._class,
            ast.Import: self._import,
            ast.ImportFrom: self._import_from,
            ast.Assign: self._assign,
            ast.AnnAssign: self._ann_assign,
            ast.AugAssign: self._aug_assign,
            ast.Delete: self._delete,
            ast.Global: self._global,
            ast.Nonlocal: self._global,
            ast.If: self._if,
            ast.While: self._while,
            ast.For: self._for,
            ast.AsyncFor: self._for,
            ast.Try: self._try,
            ast.With: self._with,
            ast.AsyncWith: self._with,
            ast.Match: self._match,
            ast.Assert: self._assert,
            ast.Expr: self._expr,
            ast.Call: self._call,
            ast.Attribute: self._attribute,
            ast.Name: self._name,
            ast.Constant: self._constant,
            ast.Lambda: self._lambda,
            ast.IfExp: self._if_exp,
            ast.BoolOp: self._boolean,
            ast.NamedExpr: self._named,
            ast.Dict: self._dict,
            ast.JoinedStr: self._format,
            ast.ListComp: self._comprehension,
            ast.SetComp: self._comprehension,
            ast.GeneratorExp: self._comprehension,
            ast.DictComp: self._comprehension,
            ast.MatchAs: self._match_capture,
            ast.MatchStar: self._match_capture,
            ast.MatchMapping: self._match_mapping,
        }
        if hasattr(ast, "TryStar"):
            self._handlers[ast.TryStar] = self._try

    def block_of(self, statements: Sequence[ast.stmt]) -> Block:
        self._all(statements)
        frame = self._frames[0]
        return Block(
            imports=tuple(frame.imports),
            assignments=tuple(frame.assignments),
            functions=tuple(frame.functions),
            classes=tuple(frame.classes),
            calls=tuple(frame.calls),
            attributes=tuple(frame.attributes),
            tests=tuple(frame.tests),
            reads=tuple(frame.reads),
            strings=tuple(frame.strings),
        )

    # helpers --------------------------------------------------------------------------------------

    @property
    def _frame(self) -> _Frame:
        return self._frames[-1]

    @property
    def _condition(self) -> str:
        """The strictest condition that holds here within the current function, class or module."""
        if "type-checking" in self._conditions:
            return "type-checking"
        return "conditional" if "conditional" in self._conditions else ""

    def _line(self, node: ast.AST) -> int:
        line: int = node.lineno  # type: ignore[attr-defined]
        outer = self._in_format
        if outer is not None:
            # Before Python 3.12, what stands in an f-string of several lines may claim any line.
            line = min(max(line, outer.lineno), outer.end_lineno or outer.lineno)
        return line + self._shift

    def _text(self, node: ast.expr) -> str:
        dotted = _dotted(node)
        if dotted:
            return dotted
        if type(node) is ast.Constant and type(node.value) in (int, bool, str) and not node.kind:
            return repr(node.value)
        if self._in_format is not None:
            return ast.unparse(node)
        return normal.expression(self._source(node))

    def _source(self, node: ast.expr) -> str:
        """The source text of an expression, outside f-strings."""
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        start, end = node.col_offset, node.end_col_offset or 0
        if self._encoded is not None:
            parts = self._encoded[first : last + 1]
            parts[-1] = parts[-1][:end]
            parts[0] = parts[0][start:]
            return b"\n".join(parts).decode()
        if first == last:
            return self._lines[first][start:end]
        lines = self._lines[first : last + 1]
        lines[-1] = lines[-1][:end]
        lines[0] = lines[0][start:]
        return "\n".join(lines)

    def _annotation(self, node: ast.expr | None) -> str | None:
        return None if node is None else normal.annotation(self._source(node))

    def _visit(self, node: ast.AST | None) -> None:
        if node is None:
            return
        handler = self._handlers.get(type(node))
        if handler is not None:
            handler(node)
        else:
            self._visit_children(node)

    def _visit_children(self, node: ast.AST) -> None:
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(value, list):
                self._all(value)
            elif isinstance(value, ast.AST):
                self._visit(value)

    def _all(self, nodes: Iterable[ast.AST | None]) -> None:
        for node in nodes:
            if isinstance(node, ast.AST):
                self._visit(node)

    @contextmanager
    def _under(self, condition: str, narrowed: _Narrowed | None = None) -> Iterator[None]:
        """Visit something that runs only sometimes: what it narrows does not hold afterwards."""
        before, guards = self._narrowed, self._guards
        self._narrowed = {**before, **(narrowed or {})}
        self._guards = set(guards)
        self._conditions.append(condition)
        try:
            yield
        finally:
            self._conditions.pop()
            # Only what was known before and was not given a new value meanwhile still holds.
            self._narrowed = {k: v for k, v in before.items() if self._narrowed.get(k) is not None}
            self._guards = guards

    def _forget(self, target: str) -> None:
        """A new value: nothing is known any more of it, nor of what hangs on it."""
        if not self._narrowed:
            return
        for known in [k for k in self._narrowed if k == target or k.startswith(target + ".")]:
            del self._narrowed[known]

    def _bind(
        self, target: ast.expr, value: str, operator: str, annotation: str | None = None
    ) -> None:
        """Record that a target is given a value, and visit what the target reads."""
        if isinstance(target, (ast.Tuple, ast.List)):
            for element in target.elts:
                self._bind(element, "", operator if operator != "=" else "unpack")
            return
        if isinstance(target, ast.Starred):
            self._bind(target.value, "", operator)
            return
        text = self._text(target)
        self._bind_text(text, value, self._line(target), operator, annotation)
        if isinstance(target, ast.Name):
            self._frame.bound.add(target.id)
        elif isinstance(target, ast.Attribute):
            self._attribute(target, store=True)
        else:
            self._visit_children(target)

    def _bind_text(
        self, text: str, value: str, line: int, operator: str, annotation: str | None = None
    ) -> None:
        self._forget(text)
        self._frame.assignments.append(
            Assignment(text, value, line, annotation, self._condition, operator)
        )

    def _bind_name(self, name: str, node: ast.AST, operator: str) -> None:
        """Record that a bare name in a clause (`except ... as name`) is given a value."""
        self._bind_text(name, "", self._line(node), operator)
        self._frame.bound.add(name)

    # statements -----------------------------------------------------------------------------------

    def _expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            self._frame.strings.append((node.value.value, self._line(node)))
        self._visit(node.value)

    def _import(self, node: ast.Import) -> None:
        for alias in node.names:
            bound = alias.asname or alias.name.partition(".")[0]
            self._bind_import(Import(alias.name, "", bound, self._line(node), 0, self._condition))

    def _import_from(self, node: ast.ImportFrom) -> None:
        module, level, line = node.module or "", node.level, self._line(node)
        for alias in node.names:
            bound = alias.asname or alias.name
            self._bind_import(Import(module, alias.name, bound, line, level, self._condition))

    def _bind_import(self, fact: Import) -> None:
        self._frame.imports.append(fact)
        self._frame.bound.add(fact.bound)
        self._forget(fact.bound)

    def _assign(self, node: ast.Assign) -> None:
        self._visit(node.value)
        value = self._text(node.value)
        known = self._classes_of(node.value)
        for target in node.targets:
            self._bind(target, value, "=")
            if known:
                self._narrowed[self._text(target)] = known

    def _ann_assign(self, node: ast.AnnAssign) -> None:
        self._visit(node.value)
        if self._frame.kind != "function":
            # Python never evaluates the annotations of a function's own variables.
            self._visit(node.annotation)
        known = self._classes_of(node.value) if node.value is not None else ()
        value = self._text(node.value) if node.value is not None else ""
        self._bind(node.target, value, "=", self._annotation(node.annotation))
        if known:
            self._narrowed[self._text(node.target)] = known

    def _classes_of(self, value: ast.expr) -> tuple[str, ...]:
        """What is known of a value that is being assigned: `cast(C, x)`, or a narrowed name."""
        if isinstance(value, ast.Call) and _dotted(value.func) in ("cast", "typing.cast"):
            return _class_names(value.args[0]) if len(value.args) == 2 else ()
        return self._narrowed.get(_dotted(value), ())

    def _aug_assign(self, node: ast.AugAssign) -> None:
        self._visit(node.value)
        self._bind(node.target, self._text(node.value), _OPERATORS[type(node.op)])

    def _delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._bind(target, "", "del")

    def _global(self, node: ast.Global | ast.Nonlocal) -> None:
        self._frame.declared_global.update(node.names)

    def _assert(self, node: ast.Assert) -> None:
        self._visit(node.test)
        self._visit(node.msg)
        self._narrowed = {**self._narrowed, **self._when(node.test, True)}

    def _if(self, node: ast.If) -> None:
        self._visit(node.test)
        checking = _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        yes, no = self._when(node.test, True), self._when(node.test, False)
        with self._under("type-checking" if checking else "conditional", yes):
            self._guards |= _guards(node.test)
            self._all(node.body)
        if node.orelse:
            with self._under("conditional", no):
                self._all(node.orelse)
        if _leaves(node.body):
            self._narrowed = {**self._narrowed, **no}
        if _leaves(node.orelse):
            self._narrowed = {**self._narrowed, **yes}

    def _while(self, node: ast.While) -> None:
        self._visit(node.test)
        with self._under("conditional", self._when(node.test, True)):
            self._all(node.body)
        with self._under("conditional"):
            self._all(node.orelse)

    def _for(self, node: ast.For | ast.AsyncFor) -> None:
        self._visit(node.iter)
        with self._under("conditional"):
            self._bind(node.target, "", "for")
            self._all(node.body)
        with self._under("conditional"):
            self._all(node.orelse)

    def _try(self, node: Any) -> None:
        with self._under("conditional"):
            self._all(node.body)
        for handler in node.handlers:
            with self._under("conditional"):
                self._visit(handler.type)
                if handler.name is not None:
                    self._bind_name(handler.name, handler, "except")
                self._all(handler.body)
        for rest in (node.orelse, node.finalbody):
            with self._under("conditional"):
                self._all(rest)

    def _with(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self._visit(item.context_expr)
            if item.optional_vars is not None:
                self._bind(item.optional_vars, self._text(item.context_expr), "with")
        self._all(node.body)

    def _match(self, node: ast.Match) -> None:
        self._visit(node.subject)
        for case in node.cases:
            with self._under("conditional"):
                self._visit(case.pattern)
                self._visit(case.guard)
                self._all(case.body)

    def _match_capture(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if isinstance(node, ast.MatchAs):
            self._visit(node.pattern)
        if node.name is not None:
            self._bind_name(node.name, node, "case")

    def _match_mapping(self, node: ast.MatchMapping) -> None:
        for key, pattern in zip(node.keys, node.patterns, strict=True):
            self._visit(key)
            self._visit(pattern)
        if node.rest is not None:
            self._bind_name(node.rest, node, "case")

    # definitions ----------------------------------------------------------------------------------

    def _function(self, node: _Definition) -> None:
        decorators = tuple(self._text(d) for d in node.decorator_list)
        self._all(node.decorator_list)
        self._defaults_of(node.args)
        self._all(_annotations_of(node))
        in_class = self._frame.kind == "class"
        condition = self._condition
        frame = self._enter("function", node.name)
        frame.bound |= {p.arg for p, _, _ in _parameters(node.args)}
        self._all(node.body)
        qualname = self._leave()
        function = Function(
            qualname=qualname,
            line=self._line(node),
            end=(node.end_lineno or node.lineno) + self._shift,
            kind=function_kind(node.name, decorators, in_class),
            signature=self._signature(node),
            decorators=decorators,
            condition=condition,
            imports=tuple(frame.imports),
            calls=tuple(frame.calls),
            attributes=tuple(frame.attributes),
            tests=tuple(frame.tests),
            assignments=tuple(frame.assignments),
            reads=self._free(frame),
            local_names=tuple(sorted(frame.bound - frame.declared_global)),
            global_names=tuple(sorted(frame.declared_global)),
            nested=tuple(frame.functions),
            nested_classes=tuple(frame.classes),
        )
        self._frame.functions.append(function)
        self._frame.bound.add(node.name)
        self._forget(node.name)
        if self._frame.kind == "function":
            self._hand_up(frame, function.reads)

    def _class(self, node: ast.ClassDef) -> None:
        self._all(node.decorator_list)
        self._all(base.value if isinstance(base, ast.Starred) else base for base in node.bases)
        self._all(keyword.value for keyword in node.keywords)
        condition = self._condition
        frame = self._enter("class", node.name)
        self._all(node.body)
        qualname = self._leave()
        self._frame.classes.append(
            Class(
                qualname=qualname,
                line=self._line(node),
                end=(node.end_lineno or node.lineno) + self._shift,
                bases=tuple(self._base(base) for base in node.bases),
                keywords=tuple((k.arg or "**", self._text(k.value)) for k in node.keywords),
                decorators=tuple(self._text(d) for d in node.decorator_list),
                condition=condition,
                fields=tuple(frame.assignments),
                imports=tuple(frame.imports),
                functions=tuple(frame.functions),
                classes=tuple(frame.classes),
            )
        )
        self._frame.bound.add(node.name)
        self._forget(node.name)
        if self._frame.kind == "function":
            inner = [r for f in frame.functions for r in f.reads]
            self._hand_up(frame, (*self._free(frame), *inner))
            for function in frame.functions:
                self._frame.calls += function.calls
                self._frame.attributes += function.attributes
                self._frame.tests += function.tests

    def _base(self, node: ast.expr) -> str:
        if isinstance(node, ast.Starred):
            return "*" + normal.annotation(self._source(node.value))
        return normal.annotation(self._source(node))

    def _enter(self, kind: str, name: str) -> _Frame:
        if self._frame.kind == "function":
            self._scope.append("<locals>")
        self._scope.append(name)
        frame = _Frame(kind)
        self._saved.append((self._narrowed, self._guards, self._conditions))
        self._narrowed, self._guards, self._conditions = {}, set(), []
        self._frames.append(frame)
        return frame

    def _leave(self) -> str:
        qualname = ".".join(self._scope)
        self._frames.pop()
        self._narrowed, self._guards, self._conditions = self._saved.pop()
        self._scope.pop()
        if self._scope and self._scope[-1] == "<locals>":
            self._scope.pop()
        return qualname

    def _hand_up(self, frame: _Frame, reads: Sequence[Read]) -> None:
        """What a nested function does, its enclosing function does."""
        outer = self._frame
        outer.calls += frame.calls
        outer.attributes += frame.attributes
        outer.tests += frame.tests
        outer.reads += reads

    def _free(self, frame: _Frame) -> tuple[Read, ...]:
        """The reads of names that the frame does not bind, the first of each name and line."""
        local = frame.bound - frame.declared_global
        return tuple(dict.fromkeys(r for r in frame.reads if r.name not in local))

    def _signature(self, node: _Definition) -> Signature:
        return Signature(
            parameters=tuple(
                Parameter(
                    parameter.arg,
                    kind,
                    self._text(default) if default is not None else None,
                    self._annotation(parameter.annotation),
                )
                for parameter, kind, default in _parameters(node.args)
            ),
            returns=self._annotation(node.returns),
            is_async=isinstance(node, ast.AsyncFunctionDef),
        )

    def _defaults_of(self, arguments: ast.arguments) -> None:
        self._all(default for _, _, default in _parameters(arguments))

    # expressions ----------------------------------------------------------------------------------

    def _call(self, node: ast.Call) -> None:
        func = node.func
        callee = self._text(func)
        receiver, name = "", callee
        if isinstance(func, ast.Attribute):
            receiver, name = self._text(func.value), func.attr
        arguments = _arguments(node)
        line = self._line(node)
        self._frame.calls.append(
            Call(
                callee=callee,
                receiver=receiver,
                name=name,
                args=tuple(
                    Argument(self._text(value), keyword, star) for value, keyword, star in arguments
                ),
                line=line,
                narrowed=self._narrowed.get(receiver, ()) if receiver else (),
            )
        )
        if callee == "isinstance" and len(arguments) == 2:
            self._frame.tests.append(
                InstanceTest(self._text(arguments[0][0]), _class_names(arguments[1][0]), line)
            )
        self._visit(func)
        for value, _, _ in arguments:
            self._visit(value)

    def _attribute(self, node: ast.Attribute, store: bool = False) -> None:
        value = _dotted(node.value)
        if isinstance(node.value, ast.Call):
            maker = _dotted(node.value.func)
            value = self._text(node.value) if maker in ("cast", "typing.cast", "super") else ""
        if value:
            self._frame.attributes.append(
                AttributeUse(
                    value,
                    node.attr,
                    self._line(node),
                    store,
                    self._narrowed.get(value, ()),
                    (value, node.attr) in self._guards,
                )
            )
        self._visit(node.value)

    def _name(self, node: ast.Name) -> None:
        self._frame.reads.append(Read(node.id, self._line(node)))

    def _constant(self, node: ast.Constant) -> None:
        """Nothing is read."""

    def _format(self, node: ast.JoinedStr) -> None:
        outer, self._in_format = self._in_format, self._in_format or node
        self._visit_children(node)
        self._in_format = outer

    def _dict(self, node: ast.Dict) -> None:
        for key, value in zip(node.keys, node.values, strict=True):
            self._visit(key)
            self._visit(value)

    def _lambda(self, node: ast.Lambda) -> None:
        self._defaults_of(node.args)
        names = {p.arg for p, _, _ in _parameters(node.args)}
        before = len(self._frame.reads)
        self._visit(node.body)
        self._frame.reads[before:] = [r for r in self._frame.reads[before:] if r.name not in names]

    def _comprehension(self, node: _Comprehension) -> None:
        frame = self._frame
        bound_before, narrowed = set(frame.bound), self._narrowed
        before, count = len(frame.reads), len(frame.assignments)
        self._narrowed = dict(narrowed)
        for clause in node.generators:
            self._visit(clause.iter)
            self._bind(clause.target, "", "for")
            for condition in clause.ifs:
                self._visit(condition)
                self._narrowed.update(self._when(condition, True))
        if isinstance(node, ast.DictComp):
            self._visit(node.key)
            self._visit(node.value)
        else:
            self._visit(node.elt)
        # The loop variables live in the comprehension only.
        names = frame.bound - bound_before
        frame.reads[before:] = [r for r in frame.reads[before:] if r.name not in names]
        kept = [a for a in frame.assignments[count:] if a.operator == ":="]
        frame.bound = bound_before | {a.target for a in kept}
        frame.assignments[count:] = kept
        self._narrowed = narrowed

    def _named(self, node: ast.NamedExpr) -> None:
        self._visit(node.value)
        self._bind(node.target, self._text(node.value), ":=")

    def _if_exp(self, node: ast.IfExp) -> None:
        self._visit(node.test)
        with self._under("conditional", self._when(node.test, True)):
            self._guards |= _guards(node.test)
            self._visit(node.body)
        with self._under("conditional", self._when(node.test, False)):
            self._visit(node.orelse)

    def _boolean(self, node: ast.BoolOp) -> None:
        first, *rest = node.values
        self._visit(first)
        conjunction = isinstance(node.op, ast.And)
        known, guards = self._when(first, conjunction), _guards(first)
        for value in rest:
            with self._under("conditional", known):
                if conjunction:
                    self._guards |= guards
                self._visit(value)
            known = {**known, **self._when(value, conjunction)}
            guards = guards | _guards(value)

    # narrowing ------------------------------------------------------------------------------------

    def _when(self, test: ast.expr, outcome: bool) -> _Narrowed:
        """What holds of values when a test came out true or false."""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return self._when(test.operand, not outcome)
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == outcome:
            return {k: v for value in test.values for k, v in self._when(value, outcome).items()}
        if outcome and isinstance(test, ast.Call) and _dotted(test.func) == "isinstance":
            arguments = _arguments(test)
            if len(arguments) == 2:
                classes = _class_names(arguments[1][0])
                value = arguments[0][0]
                if isinstance(value, ast.NamedExpr):
                    value = value.target
                return {self._text(value): classes} if classes else {}
        return {}


def _guards(test: ast.expr) -> set[tuple[str, str]]:
    """The (value, attribute) pairs that a true test says exist, by `hasattr`."""
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return {pair for value in test.values for pair in _guards(value)}
    if isinstance(test, ast.Call) and _dotted(test.func) == "hasattr" and len(test.args) == 2:
        name = test.args[1]
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            return {(_dotted(test.args[0]), name.value)}
    return set()


def _leaves(body: Sequence[ast.stmt]) -> bool:
    """Whether control never runs past the end of a block."""
    return bool(body) and isinstance(body[-1], (ast.Return, ast.Raise, ast.Continue, ast.Break))


def _dotted(node: ast.AST | None) -> str:
    """`a.b.c` for a name or a chain of attributes, else the empty text."""
    if type(node) is ast.Name:
        return node.id
    if type(node) is ast.Constant:
        return str(node.value) if node.value in (None, True, False) and _is_word(node) else ""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ""
    parts.append(node.id)
    return ".".join(reversed(parts))


def _is_word(node: ast.Constant) -> bool:
    """Whether it is `None`, `True` or `False`, and not a number that equals one of them."""
    return node.value is None or isinstance(node.value, bool)


def _class_names(node: ast.expr) -> tuple[str, ...]:
    """The dotted names of the classes in `isinstance`'s second argument or in an annotation."""
    if isinstance(node, (ast.Tuple, ast.List)):
        return tuple(name for e in node.elts for name in _class_names(e))
    if isinstance(node, ast.BinOp):
        return (*_class_names(node.left), *_class_names(node.right))
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return (node.value,)
    dotted = _dotted(node)
    return (dotted,) if dotted else ()


def _arguments(node: ast.Call) -> list[tuple[ast.expr, str | None, str]]:
    """The arguments of a call in source order: value, keyword, and `*` or `**`."""
    found: list[tuple[ast.expr, str | None, str]] = [
        (a.value, None, "*") if isinstance(a, ast.Starred) else (a, None, "") for a in node.args
    ]
    found += [(k.value, k.arg, "" if k.arg else "**") for k in node.keywords]
    if node.keywords and any(star == "*" for _, _, star in found):
        # `f(a=1, *b)` is the one case in which they stand in another order.
        found.sort(key=lambda argument: (argument[0].lineno, argument[0].col_offset))
    return found


def _parameters(arguments: ast.arguments) -> Iterator[tuple[ast.arg, str, ast.expr | None]]:
    """The parameters of a function in order: name and annotation, kind, default."""
    by_position = [(a, "positional-only") for a in arguments.posonlyargs]
    by_position += [(a, "positional") for a in arguments.args]
    missing = len(by_position) - len(arguments.defaults)
    for number, (parameter, kind) in enumerate(by_position):
        yield parameter, kind, arguments.defaults[number - missing] if number >= missing else None
    if arguments.vararg is not None:
        yield arguments.vararg, "*args", None
    for parameter, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield parameter, "keyword-only", default
    if arguments.kwarg is not None:
        yield arguments.kwarg, "**kwargs", None


def _annotations_of(node: _Definition) -> Iterator[ast.expr]:
    for parameter, _, _ in _parameters(node.args):
        if parameter.annotation is not None:
            yield parameter.annotation
    if node.returns is not None:
        yield node.returns
