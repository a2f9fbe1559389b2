"""The facts of a piece of source, read with libcst: what `collect` does where the interpreter's own
parser does not know the syntax.

Slow, and complete: libcst reads every version of Python in every version of Python. One pass over
the tree with a dispatch table instead of libcst's visitors, which enter every blank and comma.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider

from vllm_drift import normal
from vllm_drift.collect import NotParsed
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

__all__ = ["collect", "cut_parsed"]


def collect(text: str, *, in_class: bool = False) -> Block:
    """Collect the facts of statements. `in_class`: they are members of a class, maybe indented.

    Raises NotParsed.
    """
    indented = next((line for line in text.split("\n") if line.strip()), "")[:1] in (" ", "\t")
    try:
        module = cst.parse_module(f"class _:\n{text}" if indented else text)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise NotParsed(" ".join(str(error).split())) from error
    positions = _positions_of(module)
    collector = _Collector(module, positions, shift=-1 if indented else 0, in_class=in_class)
    statements: Sequence[cst.CSTNode] = module.body
    if indented:
        outer = module.body[0]
        assert isinstance(outer, cst.ClassDef)
        statements = outer.body.body
    return collector.block_of(statements)


def _positions_of(module: cst.Module) -> Any:
    """Where each node stands in the source."""
    wrapper = MetadataWrapper(module, unsafe_skip_copy=True)
    provider = PositionProvider()
    generate = getattr(provider, "_gen", None)
    if generate is not None:
        # `resolve` also walks the tree for visitors, of which there are none here: half of its
        # time.
        positions = generate(wrapper)
        if positions:
            return positions
    return wrapper.resolve(PositionProvider)


def cut_parsed(text: str) -> tuple[Segment, ...]:
    """Cut a module as `segments.cut` does, by parsing it: slow, and never wrong.

    Raises NotParsed.
    """
    try:
        module = cst.parse_module(text)
    except (cst.ParserSyntaxError, RecursionError) as error:
        raise NotParsed(" ".join(str(error).split())) from error
    positions = _positions_of(module)
    return _cut_statements(module.body, positions, text.count("\n") + 2, "")


def _cut_statements(
    statements: Sequence[cst.CSTNode], positions: Any, end: int, prefix: str
) -> tuple[Segment, ...]:
    starts = [
        min(int(positions[part].start.line) for part in (node, *getattr(node, "decorators", ())))
        for node in statements
    ]
    ends = [*starts[1:], end][: len(starts)]
    segments = []
    for node, start, after in zip(statements, starts, ends, strict=True):
        if not isinstance(node, (cst.FunctionDef, cst.ClassDef)):
            segments.append(Segment("other", "", start, after, start, after))
            continue
        name, line = f"{prefix}{node.name.value}", int(positions[node.name].start.line)
        if isinstance(node, cst.FunctionDef):
            body = after
            if isinstance(node.body, cst.IndentedBlock):
                body = min(int(positions[s].start.line) for s in _first_lines(node.body))
            segments.append(Segment("function", name, start, after, line, body))
        elif isinstance(node.body, cst.IndentedBlock):
            members = _cut_statements(node.body.body, positions, after, f"{name}.")
            body = members[0].start if members else after
            segments.append(Segment("class", name, start, after, line, body, members))
        else:
            segments.append(Segment("class", name, start, after, line, after))
    return joined(segments) if prefix else tuple(segments)


def _first_lines(block: cst.IndentedBlock) -> Iterator[cst.CSTNode]:
    first = block.body[0]
    yield first
    yield from getattr(first, "decorators", ())


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
_SKIPPED = ("whitespace", "leading_lines", "lines_after", "trailing_whitespace", "header", "footer")
_SKIPPED_NAMES = frozenset(
    [
        "lpar",
        "rpar",
        "lbracket",
        "rbracket",
        "lbrace",
        "rbrace",
        "comma",
        "semicolon",
        "dot",
        "equal",
        "colon",
        "first_colon",
        "second_colon",
        "operator",
        "indicator",
        "star",
        "asynchronous",
        "type_comment",
        "newline",
    ]
)
_children_of: dict[type, tuple[str, ...]] = {}


def _children(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """The child nodes that carry meaning, in source order."""
    kind = type(node)
    names = _children_of.get(kind)
    if names is None:
        names = _children_of[kind] = tuple(
            f.name
            for f in fields(kind)
            if not f.name.startswith(_SKIPPED)
            and f.name not in _SKIPPED_NAMES
            and f.name != "__slots__"
        )
    for name in names:
        value = getattr(node, name, None)
        if isinstance(value, cst.CSTNode):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, cst.CSTNode):
                    yield item


class _Collector:
    def __init__(self, module: cst.Module, positions: Any, *, shift: int, in_class: bool) -> None:
        self._module = module
        self._positions = positions
        self._shift = shift
        self._frames: list[_Frame] = [_Frame("class" if in_class else "module")]
        self._scope: list[str] = []
        self._conditions: list[str] = []
        self._narrowed: _Narrowed = {}
        self._guards: set[tuple[str, str]] = set()
        self._handlers: dict[type, Callable[[Any], None]] = {
            cst.FunctionDef: self._function,
            cst.ClassDef: self._class,
            cst.Import: self._import,
            cst.ImportFrom: self._import_from,
            cst.Assign: self._assign,
            cst.AnnAssign: self._ann_assign,
            cst.AugAssign: self._aug_assign,
            cst.Del: self._delete,
            cst.Global: self._global,
            cst.Nonlocal: self._global,
            cst.If: self._if,
            cst.While: self._while,
            cst.For: self._for,
            cst.Try: self._try,
            cst.TryStar: self._try,
            cst.With: self._with,
            cst.Match: self._match,
            cst.IndentedBlock: self._suite,
            cst.SimpleStatementSuite: self._suite,
            cst.Assert: self._assert,
            cst.Expr: self._expr,
            cst.Call: self._call,
            cst.Attribute: self._attribute,
            cst.Name: self._name,
            cst.Lambda: self._lambda,
            cst.IfExp: self._if_exp,
            cst.BooleanOperation: self._boolean,
            cst.NamedExpr: self._named,
            cst.ListComp: self._comprehension,
            cst.SetComp: self._comprehension,
            cst.GeneratorExp: self._comprehension,
            cst.DictComp: self._comprehension,
            cst.Arg: self._arg,
            cst.MatchAs: self._match_capture,
            cst.MatchStar: self._match_capture,
            cst.MatchClass: self._match_class,
            cst.MatchMapping: self._match_mapping,
        }

    def block_of(self, statements: Sequence[cst.CSTNode]) -> Block:
        self._statements(statements)
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

    def _line(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].start.line) + self._shift

    def _end(self, node: cst.CSTNode) -> int:
        return int(self._positions[node].end.line) + self._shift

    def _text(self, node: cst.CSTNode) -> str:
        dotted = _dotted(node)
        if dotted:
            return dotted
        return normal.expression(self._module.code_for_node(node).strip())

    def _annotation(self, node: cst.Annotation | None) -> str | None:
        if node is None:
            return None
        return normal.annotation(self._module.code_for_node(node.annotation).strip())

    def _visit(self, node: cst.CSTNode | None) -> None:
        if node is None:
            return
        handler = self._handlers.get(type(node))
        if handler is not None:
            handler(node)
        else:
            self._visit_children(node)

    def _visit_children(self, node: cst.CSTNode) -> None:
        for child in _children(node):
            self._visit(child)

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
        for known in [k for k in self._narrowed if k == target or k.startswith(target + ".")]:
            del self._narrowed[known]

    def _bind(
        self, target: cst.CSTNode, value: str, operator: str, annotation: str | None = None
    ) -> None:
        """Record that a target is given a value, and visit what the target reads."""
        if isinstance(target, (cst.Tuple, cst.List)):
            for element in target.elements:
                self._bind(element.value, "", operator if operator != "=" else "unpack")
            return
        if isinstance(target, cst.StarredElement):
            self._bind(target.value, "", operator)
            return
        text = self._text(target)
        self._forget(text)
        self._frame.assignments.append(
            Assignment(text, value, self._line(target), annotation, self._condition, operator)
        )
        if isinstance(target, cst.Name):
            self._frame.bound.add(target.value)
        elif isinstance(target, cst.Attribute):
            self._attribute(target, store=True)
        else:
            self._visit_children(target)

    # statements -----------------------------------------------------------------------------------

    def _statements(self, statements: Sequence[cst.CSTNode]) -> None:
        for statement in statements:
            self._visit(statement)

    def _suite(self, node: cst.BaseSuite) -> None:
        self._statements(node.body)

    def _expr(self, node: cst.Expr) -> None:
        if isinstance(node.value, (cst.SimpleString, cst.ConcatenatedString)):
            value = node.value.evaluated_value
            if isinstance(value, str):
                self._frame.strings.append((value, self._line(node)))
        self._visit(node.value)

    def _import(self, node: cst.Import) -> None:
        for alias in node.names:
            module = _dotted(alias.name)
            bound = _bound_name(alias) or module.partition(".")[0]
            self._bind_import(Import(module, "", bound, self._line(node), 0, self._condition))

    def _import_from(self, node: cst.ImportFrom) -> None:
        module = _dotted(node.module) if node.module is not None else ""
        level, line = len(node.relative), self._line(node)
        if isinstance(node.names, cst.ImportStar):
            self._bind_import(Import(module, "*", "*", line, level, self._condition))
            return
        for alias in node.names:
            name = _dotted(alias.name)
            bound = _bound_name(alias) or name
            self._bind_import(Import(module, name, bound, line, level, self._condition))

    def _bind_import(self, fact: Import) -> None:
        self._frame.imports.append(fact)
        self._frame.bound.add(fact.bound)
        self._forget(fact.bound)

    def _assign(self, node: cst.Assign) -> None:
        self._visit(node.value)
        value = self._text(node.value)
        known = self._classes_of(node.value)
        for target in node.targets:
            self._bind(target.target, value, "=")
            if known:
                self._narrowed[self._text(target.target)] = known

    def _ann_assign(self, node: cst.AnnAssign) -> None:
        if node.value is not None:
            self._visit(node.value)
        if self._frame.kind != "function":
            # Python never evaluates the annotations of a function's own variables.
            self._visit(node.annotation.annotation)
        known = self._classes_of(node.value) if node.value is not None else ()
        self._bind(
            node.target,
            self._text(node.value) if node.value is not None else "",
            "=",
            self._annotation(node.annotation),
        )
        if known:
            self._narrowed[self._text(node.target)] = known

    def _classes_of(self, value: cst.BaseExpression) -> tuple[str, ...]:
        """What is known of a value that is being assigned: `cast(C, x)`, or a narrowed name."""
        if isinstance(value, cst.Call) and _dotted(value.func) in ("cast", "typing.cast"):
            if len(value.args) == 2:
                return _class_names(value.args[0].value)
            return ()
        return self._narrowed.get(_dotted(value), ())

    def _aug_assign(self, node: cst.AugAssign) -> None:
        self._visit(node.value)
        operator = self._module.code_for_node(node.operator).strip()
        self._bind(node.target, self._text(node.value), operator)

    def _delete(self, node: cst.Del) -> None:
        for target in node.target.elements if isinstance(node.target, cst.Tuple) else [node.target]:
            self._bind(target.value if isinstance(target, cst.Element) else target, "", "del")

    def _global(self, node: cst.Global | cst.Nonlocal) -> None:
        self._frame.declared_global.update(item.name.value for item in node.names)

    def _assert(self, node: cst.Assert) -> None:
        self._visit(node.test)
        self._visit(node.msg)
        self._narrowed = {**self._narrowed, **self._when(node.test, True)}

    def _if(self, node: cst.If) -> None:
        self._visit(node.test)
        test = self._text(node.test)
        checking = test in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        yes, no = self._when(node.test, True), self._when(node.test, False)
        with self._under("type-checking" if checking else "conditional", yes):
            self._guards |= _guards(node.test)
            self._visit(node.body)
        if node.orelse is not None:
            with self._under("conditional", no):
                self._visit(node.orelse.body if isinstance(node.orelse, cst.Else) else node.orelse)
        if _leaves(node.body):
            self._narrowed = {**self._narrowed, **no}
        if isinstance(node.orelse, cst.Else) and _leaves(node.orelse.body):
            self._narrowed = {**self._narrowed, **yes}

    def _while(self, node: cst.While) -> None:
        self._visit(node.test)
        with self._under("conditional", self._when(node.test, True)):
            self._visit(node.body)
        with self._under("conditional"):
            self._visit(node.orelse)

    def _for(self, node: cst.For) -> None:
        self._visit(node.iter)
        with self._under("conditional"):
            self._bind(node.target, "", "for")
            self._visit(node.body)
        with self._under("conditional"):
            self._visit(node.orelse)

    def _try(self, node: cst.Try | cst.TryStar) -> None:
        with self._under("conditional"):
            self._visit(node.body)
        for handler in node.handlers:
            with self._under("conditional"):
                self._visit(handler.type)
                if handler.name is not None:
                    self._bind(handler.name.name, "", "except")
                self._visit(handler.body)
        for rest in (node.orelse, node.finalbody):
            with self._under("conditional"):
                self._visit(rest)

    def _with(self, node: cst.With) -> None:
        for item in node.items:
            self._visit(item.item)
            if item.asname is not None:
                self._bind(item.asname.name, self._text(item.item), "with")
        self._visit(node.body)

    def _match(self, node: cst.Match) -> None:
        self._visit(node.subject)
        for case in node.cases:
            with self._under("conditional"):
                self._visit(case.pattern)
                self._visit(case.guard)
                self._visit(case.body)

    def _match_capture(self, node: cst.MatchAs | cst.MatchStar) -> None:
        if isinstance(node, cst.MatchAs):
            self._visit(node.pattern)
        if node.name is not None:
            self._bind(node.name, "", "case")

    def _match_mapping(self, node: cst.MatchMapping) -> None:
        for element in node.elements:
            self._visit(element)
        if node.rest is not None:
            self._bind(node.rest, "", "case")

    def _match_class(self, node: cst.MatchClass) -> None:
        self._visit(node.cls)
        for pattern in node.patterns:
            self._visit(pattern)
        for keyword in node.kwds:
            self._visit(keyword.pattern)

    # definitions ----------------------------------------------------------------------------------

    def _function(self, node: cst.FunctionDef) -> None:
        decorators = tuple(self._text(d.decorator) for d in node.decorators)
        for decorator in node.decorators:
            self._visit(decorator.decorator)
        self._defaults_of(node.params)
        for annotation in _annotations_of(node):
            self._visit(annotation)
        in_class = self._frame.kind == "class"
        condition = self._condition
        frame = self._enter("function", node.name.value)
        frame.bound |= {p.name.value for p in _parameters(node.params)}
        self._visit(node.body)
        qualname = self._leave()
        function = Function(
            qualname=qualname,
            line=self._line(node.name),
            end=self._end(node.body),
            kind=function_kind(node.name.value, decorators, in_class),
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
        self._frame.bound.add(node.name.value)
        self._forget(node.name.value)
        if self._frame.kind == "function":
            self._hand_up(frame, function.reads)

    def _class(self, node: cst.ClassDef) -> None:
        for decorator in node.decorators:
            self._visit(decorator.decorator)
        for arg in (*node.bases, *node.keywords):
            self._visit(arg.value)
        condition = self._condition
        frame = self._enter("class", node.name.value)
        self._visit(node.body)
        qualname = self._leave()
        self._frame.classes.append(
            Class(
                qualname=qualname,
                line=self._line(node.name),
                end=self._end(node.body),
                bases=tuple(
                    a.star + normal.annotation(self._module.code_for_node(a.value).strip())
                    for a in node.bases
                ),
                keywords=tuple(
                    (a.keyword.value if a.keyword else a.star, self._text(a.value))
                    for a in node.keywords
                ),
                decorators=tuple(self._text(d.decorator) for d in node.decorators),
                condition=condition,
                fields=tuple(frame.assignments),
                imports=tuple(frame.imports),
                functions=tuple(frame.functions),
                classes=tuple(frame.classes),
            )
        )
        self._frame.bound.add(node.name.value)
        self._forget(node.name.value)
        if self._frame.kind == "function":
            inner = [r for f in frame.functions for r in f.reads]
            self._hand_up(frame, (*self._free(frame), *inner))
            for function in frame.functions:
                self._frame.calls += function.calls
                self._frame.attributes += function.attributes
                self._frame.tests += function.tests

    def _enter(self, kind: str, name: str) -> _Frame:
        if self._frame.kind == "function":
            self._scope.append("<locals>")
        self._scope.append(name)
        frame = _Frame(kind)
        frame_state = (self._narrowed, self._guards, self._conditions)
        self._saved = [*getattr(self, "_saved", []), frame_state]
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

    def _signature(self, node: cst.FunctionDef) -> Signature:
        params = node.params
        groups: list[tuple[Sequence[cst.Param], str]] = [
            (params.posonly_params, "positional-only"),
            (params.params, "positional"),
            ([params.star_arg] if isinstance(params.star_arg, cst.Param) else [], "*args"),
            (params.kwonly_params, "keyword-only"),
            ([params.star_kwarg] if params.star_kwarg is not None else [], "**kwargs"),
        ]
        return Signature(
            parameters=tuple(
                Parameter(
                    p.name.value,
                    kind,
                    self._text(p.default) if p.default is not None else None,
                    self._annotation(p.annotation),
                )
                for group, kind in groups
                for p in group
            ),
            returns=self._annotation(node.returns),
            is_async=node.asynchronous is not None,
        )

    def _defaults_of(self, params: cst.Parameters) -> None:
        for parameter in _parameters(params):
            self._visit(parameter.default)

    # expressions ----------------------------------------------------------------------------------

    def _call(self, node: cst.Call) -> None:
        func = node.func
        callee = self._text(func)
        receiver, name = "", callee
        if isinstance(func, cst.Attribute):
            receiver, name = self._text(func.value), func.attr.value
        self._frame.calls.append(
            Call(
                callee=callee,
                receiver=receiver,
                name=name,
                args=tuple(
                    Argument(self._text(a.value), a.keyword.value if a.keyword else None, a.star)
                    for a in node.args
                ),
                line=self._line(node),
                narrowed=self._narrowed.get(receiver, ()) if receiver else (),
            )
        )
        if callee == "isinstance" and len(node.args) == 2:
            self._frame.tests.append(
                InstanceTest(
                    self._text(node.args[0].value),
                    _class_names(node.args[1].value),
                    self._line(node),
                )
            )
        self._visit(func)
        for arg in node.args:
            self._visit(arg.value)

    def _arg(self, node: cst.Arg) -> None:
        self._visit(node.value)

    def _attribute(self, node: cst.Attribute, store: bool = False) -> None:
        value = _dotted(node.value)
        if isinstance(node.value, cst.Call):
            maker = _dotted(node.value.func)
            value = self._text(node.value) if maker in ("cast", "typing.cast", "super") else ""
        if value:
            name = node.attr.value
            self._frame.attributes.append(
                AttributeUse(
                    value,
                    name,
                    self._line(node),
                    store,
                    self._narrowed.get(value, ()),
                    (value, name) in self._guards,
                )
            )
        self._visit(node.value)

    def _name(self, node: cst.Name) -> None:
        self._frame.reads.append(Read(node.value, self._line(node)))

    def _lambda(self, node: cst.Lambda) -> None:
        self._defaults_of(node.params)
        names = {p.name.value for p in _parameters(node.params)}
        before = len(self._frame.reads)
        self._visit(node.body)
        self._frame.reads[before:] = [r for r in self._frame.reads[before:] if r.name not in names]

    def _comprehension(self, node: cst.BaseComp) -> None:
        bound_before = set(self._frame.bound)
        before, narrowed, count = (
            len(self._frame.reads),
            self._narrowed,
            len(self._frame.assignments),
        )
        self._narrowed = dict(narrowed)
        clause: cst.CompFor | None = node.for_in
        while clause is not None:
            self._visit(clause.iter)
            self._bind(clause.target, "", "for")
            for condition in clause.ifs:
                self._visit(condition.test)
                self._narrowed.update(self._when(condition.test, True))
            clause = clause.inner_for_in
        if isinstance(node, cst.DictComp):
            self._visit(node.key)
            self._visit(node.value)
        else:
            self._visit(node.elt)  # type: ignore[attr-defined]
        # The loop variables live in the comprehension only.
        names = self._frame.bound - bound_before
        self._frame.reads[before:] = [r for r in self._frame.reads[before:] if r.name not in names]
        self._frame.bound = bound_before | {
            a.target for a in self._frame.assignments[count:] if a.operator == ":="
        }
        self._frame.assignments[count:] = [
            a for a in self._frame.assignments[count:] if a.operator == ":="
        ]
        self._narrowed = narrowed

    def _named(self, node: cst.NamedExpr) -> None:
        self._visit(node.value)
        self._bind(node.target, self._text(node.value), ":=")

    def _if_exp(self, node: cst.IfExp) -> None:
        self._visit(node.test)
        with self._under("conditional", self._when(node.test, True)):
            self._guards |= _guards(node.test)
            self._visit(node.body)
        with self._under("conditional", self._when(node.test, False)):
            self._visit(node.orelse)

    def _boolean(self, node: cst.BooleanOperation) -> None:
        self._visit(node.left)
        conjunction = isinstance(node.operator, cst.And)
        with self._under("conditional", self._when(node.left, conjunction)):
            if conjunction:
                self._guards |= _guards(node.left)
            self._visit(node.right)

    # narrowing ------------------------------------------------------------------------------------

    def _when(self, test: cst.BaseExpression, outcome: bool) -> _Narrowed:
        """What holds of values when a test came out true or false."""
        if isinstance(test, cst.UnaryOperation) and isinstance(test.operator, cst.Not):
            return self._when(test.expression, not outcome)
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And) == outcome:
            return {**self._when(test.left, outcome), **self._when(test.right, outcome)}
        if (
            outcome
            and isinstance(test, cst.Call)
            and _dotted(test.func) == "isinstance"
            and len(test.args) == 2
        ):
            classes = _class_names(test.args[1].value)
            value = test.args[0].value
            if isinstance(value, cst.NamedExpr):
                value = value.target
            return {self._text(value): classes} if classes else {}
        return {}


def _guards(test: cst.BaseExpression) -> set[tuple[str, str]]:
    """The (value, attribute) pairs that a true test says exist, by `hasattr`."""
    if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
        return _guards(test.left) | _guards(test.right)
    if isinstance(test, cst.Call) and _dotted(test.func) == "hasattr" and len(test.args) == 2:
        name = test.args[1].value
        if isinstance(name, cst.SimpleString) and isinstance(name.evaluated_value, str):
            return {(_dotted(test.args[0].value), name.evaluated_value)}
    return set()


def _leaves(suite: cst.BaseSuite) -> bool:
    """Whether control never runs past the suite's end."""
    if not suite.body:
        return False
    last: cst.CSTNode = suite.body[-1]
    if isinstance(last, cst.SimpleStatementLine):
        last = last.body[-1]
    return isinstance(last, (cst.Return, cst.Raise, cst.Continue, cst.Break))


def _dotted(node: cst.CSTNode | None) -> str:
    """`a.b.c` for a name or a chain of attributes, else the empty text."""
    parts = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    if not isinstance(node, cst.Name):
        return ""
    parts.append(node.value)
    return ".".join(reversed(parts))


def _class_names(node: cst.BaseExpression) -> tuple[str, ...]:
    """The dotted names of the classes in `isinstance`'s second argument or in an annotation."""
    if isinstance(node, (cst.Tuple, cst.List)):
        return tuple(name for e in node.elements for name in _class_names(e.value))
    if isinstance(node, cst.BinaryOperation):
        return (*_class_names(node.left), *_class_names(node.right))
    if isinstance(node, cst.SimpleString) and isinstance(node.evaluated_value, str):
        return (node.evaluated_value,)
    dotted = _dotted(node)
    return (dotted,) if dotted else ()


def _bound_name(alias: cst.ImportAlias) -> str:
    return _dotted(alias.asname.name) if alias.asname is not None else ""


def _parameters(params: cst.Parameters) -> Iterator[cst.Param]:
    yield from params.posonly_params
    yield from params.params
    if isinstance(params.star_arg, cst.Param):
        yield params.star_arg
    yield from params.kwonly_params
    if params.star_kwarg is not None:
        yield params.star_kwarg


def _annotations_of(node: cst.FunctionDef) -> Iterator[cst.BaseExpression]:
    for parameter in _parameters(node.params):
        if parameter.annotation is not None:
            yield parameter.annotation.annotation
    if node.returns is not None:
        yield node.returns.annotation
