"""Rows of numbers behind a bare address: how the kernels see their tables.

Knows nothing of what the tables hold. A Numba array is nine values; each costs time where it is
passed from Python, and time to compile wherever it is passed on. `Rows` is one pointer, and the
number of columns is part of its type, so that an element's place costs no multiplication by a
variable. It knows no length: whoever makes one answers for the indices, and none is negative.

    S = states(address)     # int32 rows of 6
    S[v, LINK], G[i]        # read (integers as int64) and written like an array
    prefetch(S, v)          # ask for a row that will be needed soon

A kernel that is cached does not notice an edit here: empty the cache after one.
"""

# llvmlite and Numba's extension interface are untyped.
# mypy: disable-error-code="no-untyped-call,no-any-return,misc,untyped-decorator"

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils
from numba.core import types as numba_types
from numba.core.imputils import lower_builtin
from numba.core.typing.templates import AbstractTemplate, infer_global, signature
from numba.extending import intrinsic, models, register_model

types: Any = numba_types

__all__ = ["maker", "prefetch"]


class Rows(types.Type):
    """A pointer to rows of `fields` numbers each; with one field, to a plain vector."""

    def __init__(self, item: Any, fields: int) -> None:
        self.item = item
        self.fields = fields
        super().__init__(name=f"Rows({item}, {fields})")

    @property
    def value(self) -> Any:
        """What an element is read as."""
        return types.int64 if isinstance(self.item, types.Integer) else self.item


@register_model(Rows)
class _Model(models.PrimitiveModel):
    def __init__(self, manager: Any, rows: Rows) -> None:
        super().__init__(manager, rows, ir.IntType(8).as_pointer())


def _index(rows: Any, index: Any) -> Any:
    if isinstance(rows, Rows):
        if rows.fields == 1 and isinstance(index, types.Integer):
            return types.int64
        if rows.fields > 1 and isinstance(index, types.BaseTuple) and len(index) == 2:
            return types.UniTuple(types.int64, 2)
    return None


@infer_global(operator.getitem)
class _Read(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        index = _index(args[0], args[1])
        return None if index is None else signature(args[0].value, args[0], index)


@infer_global(operator.setitem)
class _Write(AbstractTemplate):
    def generic(self, args: Any, kws: Any) -> Any:
        index = _index(args[0], args[1])
        return None if index is None else signature(types.none, args[0], index, args[0].value)


def _pointer(context: Any, builder: Any, rows: Rows, base: Any, row: Any, column: Any) -> Any:
    size = rows.item.bitwidth // 8
    offset = builder.mul(row, ir.Constant(ir.IntType(64), rows.fields * size))
    if column is not None:
        offset = builder.add(offset, builder.mul(column, ir.Constant(ir.IntType(64), size)))
    place = builder.gep(base, [offset])
    return builder.bitcast(place, context.get_value_type(rows.item).as_pointer())


def _place(context: Any, builder: Any, rows: Rows, base: Any, index: Any) -> Any:
    if rows.fields == 1:
        return _pointer(context, builder, rows, base, index, None)
    row, column = cgutils.unpack_tuple(builder, index, 2)
    return _pointer(context, builder, rows, base, row, column)


def _read(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    rows = sig.args[0]
    found = builder.load(_place(context, builder, rows, *args))
    return context.cast(builder, found, rows.item, rows.value)


def _write(context: Any, builder: Any, sig: Any, args: Any) -> Any:
    rows = sig.args[0]
    base, index, value = args
    stored = context.cast(builder, value, rows.value, rows.item)
    builder.store(stored, _place(context, builder, rows, base, index))
    return context.get_dummy_value()


for _kind in (types.BaseTuple, types.Integer):
    lower_builtin(operator.getitem, Rows, _kind)(_read)
    lower_builtin(operator.setitem, Rows, _kind, types.Any)(_write)


def maker(item: Any, fields: int) -> Callable[[int], Any]:
    """The function that makes such rows of an address (int64), for use in kernels."""
    rows = Rows(item, fields)

    @intrinsic
    def make(typing: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], context.get_value_type(rows))

        return rows(types.int64), code

    return make


@intrinsic
def prefetch(typing: Any, rows: Any, row: Any) -> Any:
    """Ask for the beginning of a row; any index will do."""

    def code(context: Any, builder: Any, sig: Any, args: Any) -> Any:
        place = _pointer(context, builder, sig.args[0], args[0], args[1], None)
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte] + [number] * 3)
        )
        # for writing, to be kept in every cache, of data
        numbers = [ir.Constant(number, value) for value in (1, 3, 1)]
        builder.call(function, [builder.bitcast(place, byte), *numbers])
        return context.get_dummy_value()

    return types.none(rows, types.int64), code
