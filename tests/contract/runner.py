"""What a vLLM release's own runner does with a suffix drafter, taken from its source: with the
proposer of `method="suffix"`, and with a class of `method="custom_class"`.

The contract tests run these statements, not a table of ours, so a release that calls differently
fails them.
"""

from __future__ import annotations

import ast
import builtins
import inspect
from types import ModuleType
from typing import Any

import numpy as np

CLASS = "SuffixDecodingProposer"
BUILT_BY = {"suffix": CLASS, "custom_class": "create_custom_proposer"}
"""The name that the runner calls to build the drafter of a method."""


def _functions(module: ModuleType) -> list[ast.FunctionDef]:
    tree = ast.parse(inspect.getsource(module))
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _narrows(statement: ast.stmt) -> bool:
    """Whether a statement is `assert isinstance(<something>, SuffixDecodingProposer)`."""
    return isinstance(statement, ast.Assert) and any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "isinstance"
        and isinstance(node.args[1], ast.Name)
        and node.args[1].id == CLASS
        for node in ast.walk(statement.test)
    )


def _asks_for(node: ast.AST, method: str) -> bool:
    """Whether a node is `if <something>.method == "<method>": ... propose ...`."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Compare)
        and ast.unparse(node.test).endswith(f".method == {method!r}")
        and any(
            isinstance(part, ast.Attribute) and part.attr == "propose"
            for statement in node.body
            for part in ast.walk(statement)
        )
    )


def construction(module: ModuleType, method: str) -> ast.Call:
    """The expression with which the runner builds the drafter of a method."""
    name = BUILT_BY[method]
    found = [
        node
        for function in _functions(module)
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name
    ]
    (call,) = found
    return call


def branch_of(module: ModuleType, method: str) -> list[ast.stmt]:
    """The statements with which the runner asks the drafter of a method for drafts."""
    if method == "custom_class":
        (asking,) = [
            node
            for function in _functions(module)
            for node in ast.walk(function)
            if _asks_for(node, method)
        ]
        assert isinstance(asking, ast.If)
        return asking.body
    found = [
        block
        for function in _functions(module)
        for node in ast.walk(function)
        for block in (getattr(node, "body", None), getattr(node, "orelse", None))
        if isinstance(block, list) and any(_narrows(statement) for statement in block)
    ]
    (branch,) = found
    return branch


def _samples_arrays(module: ModuleType) -> bool:
    """Whether the runner has the sampled ids as arrays, as 0.11.1 did, and not as lists."""
    return any(
        argument.arg == "sampled_token_ids"
        and argument.annotation is not None
        and "ndarray" in ast.unparse(argument.annotation)
        for function in _functions(module)
        for argument in function.args.args
    )


def construct(module: ModuleType, runner: Any, method: str = "suffix") -> Any:
    """Build the drafter as the runner does; `runner` is its `self`."""
    code = compile(ast.Expression(construction(module, method)), module.__file__ or "", "eval")
    return eval(code, vars(module), {"self": runner})


def propose(
    module: ModuleType,
    runner: Any,
    sampled_token_ids: list[list[int]],
    num_tokens: int,
    method: str = "suffix",
) -> Any:
    """Run the runner's branch of the method and return what it then holds as drafts.

    The branch's free names are bound by what they mean: the sampled ids, the tokens wanted at this
    step, no slot mappings. A name that means none of these is a change that the plugin has to look
    at, so it raises.
    """
    branch = branch_of(module, method)
    sampled: Any = sampled_token_ids
    if _samples_arrays(module):
        sampled = [np.array(ids, np.int32) for ids in sampled_token_ids]
    known = {"self": runner, "sampled_token_ids": sampled, "slot_mappings": None}
    stored = set()
    for statement in branch:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Name):
                continue
            if isinstance(node.ctx, ast.Store):
                stored.add(node.id)
            elif (
                node.id not in known
                and not hasattr(module, node.id)
                and not hasattr(builtins, node.id)
            ):
                if "num_spec" not in node.id:
                    raise AssertionError(
                        f"the runner's call now uses {node.id!r}: {ast.unparse(statement)}"
                    )
                known[node.id] = num_tokens
    code = compile(ast.Module(branch, type_ignores=[]), module.__file__ or "", "exec")
    exec(code, vars(module), known)
    (drafts,) = (known[name] for name in stored)
    return drafts
