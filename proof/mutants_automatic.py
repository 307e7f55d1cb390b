"""Automatic mutants: every place of a module where one of Cosmic Ray's operators, or one of ours, applies."""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Iterable, Iterator
from typing import Any

import attrs
import cosmic_ray.plugins  # type: ignore[import-untyped]
from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-untyped]
from cosmic_ray.mutating import mutate_code  # type: ignore[import-untyped]
from cosmic_ray.operators.operator import Operator  # type: ignore[import-untyped]
from parso.python.tree import Keyword
from parso.tree import BaseNode, NodeOrLeaf

from .planting import Mutant, source_path

__all__ = ["Spec", "enumerate_specs", "mutant_of"]

NOISE = re.compile(
    "ReplaceBinaryOperator_.*_(Div|Pow|RShift|LShift|BitOr|BitAnd|BitXor)"
    "|ReplaceComparisonOperator_(Is|IsNot)_(Eq|NotEq|Lt|LtE|Gt|GtE)"
    "|ReplaceComparisonOperator_(Eq|NotEq|Lt|LtE|Gt|GtE)_(Is|IsNot)"
)
"""Operators that are not tried: on ints and enum members they raise at once, or do the same as one that is tried."""
SKIPPED_METHODS = ("__repr__", "__str__")


@attrs.frozen
class Spec:
    """One automatic mutant: the `occurrence`-th place in `module` where `operator` applies."""

    module: str
    line: int
    operator: str
    occurrence: int
    source_digest: str

    @property
    def key(self) -> str:
        return f"{self.module}@{self.source_digest}:{self.queue}:{self.operator}:{self.occurrence}"


class RemoveStatement(Operator):  # type: ignore[misc]
    """Leaves out one statement with an effect, a mistake that Cosmic Ray has no operator for."""

    def mutation_positions(self, node: NodeOrLeaf) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
        if (
            isinstance(node, BaseNode)
            and node.type == "simple_stmt"
            and node.children[0].type in ("expr_stmt", "atom_expr", "del_stmt", "power")
        ):
            yield node.start_pos, node.end_pos

    def mutate(self, node: BaseNode, index: int) -> BaseNode:
        statement = node.children[0]
        node.children[0] = Keyword("pass", statement.start_pos, prefix=statement.get_first_leaf().prefix)
        return node

    @classmethod
    def examples(cls) -> Iterable[object]:
        return ()


def _operators() -> dict[str, Operator]:
    """The operators without arguments, by name."""
    found: dict[str, Operator] = {"RemoveStatement": RemoveStatement()}
    for name in sorted(cosmic_ray.plugins.operator_names()):
        kind = cosmic_ray.plugins.get_operator(name)
        if not kind.arguments() and not NOISE.search(name):
            found[name.removeprefix("core/")] = kind()
    return found


OPERATORS = _operators()


def enumerate_specs(modules: Iterable[str]) -> list[Spec]:
    """Every automatic mutant of `modules`, except at places where a change has no effect."""
    return [spec for module in modules for spec in _specs_of(module)]


def _specs_of(module: str) -> Iterator[Spec]:
    source = source_path(module).read_text()
    nodes, skipped = list(ast_nodes(get_ast(source))), _skipped(source)
    digest = hashlib.sha256(source.encode()).hexdigest()[:8]
    for name, operator in OPERATORS.items():
        positions = (start for node in nodes for start, _ in operator.mutation_positions(node))
        for occurrence, at in enumerate(positions):
            if not any(start <= at < stop for start, stop in skipped):
                yield Spec(module, at[0], name, occurrence, digest)


def mutant_of(spec: Spec) -> Mutant | None:
    """The mutant, as a patch of the whole source; None if that is no valid Python, or the same program."""
    source = source_path(spec.module).read_text()
    mutated = mutate_code(source, OPERATORS[spec.operator], spec.occurrence)
    if mutated is None or not _differs(source, mutated):
        return None
    return Mutant(spec.key, spec.module, source, mutated, "")


def _differs(source: str, mutated: str) -> bool:
    try:
        return ast.dump(ast.parse(mutated)) != ast.dump(ast.parse(source))
    except (SyntaxError, ValueError):
        return False


# -- what is left alone -----------------------------------------------------------------------------------------------

Place = tuple[int, int]


def _skipped(source: str) -> list[tuple[Place, Place]]:
    """The extents of annotations, docstrings, imports, `__all__`, representations, protocols and type-checking code."""
    tree = ast.parse(source)
    return [_extent(found) for node in ast.walk(tree) for found in _left_alone(node)]


def _left_alone(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if name in SKIPPED_METHODS:
            yield node
        case ast.FunctionDef(returns=ast.AST() as returns) | ast.AsyncFunctionDef(returns=ast.AST() as returns):
            yield returns
        case ast.arg(annotation=ast.AST() as annotation):
            yield annotation
        case ast.AnnAssign(annotation=ast.AST() as annotation):
            yield node if ast.unparse(annotation) == "TypeAlias" else annotation
        case ast.Expr(value=ast.Constant()) | ast.Import() | ast.ImportFrom():
            yield node
        case ast.Assign(targets=[ast.Name(id="__all__")]):
            yield node
        case ast.If(test=test) if ast.unparse(test) in ("TYPE_CHECKING", "__name__ == '__main__'"):
            yield node
        case ast.ClassDef(bases=[ast.Name(id="Protocol")]):
            yield node


def _extent(node: ast.AST) -> tuple[Place, Place]:
    where: Any = node  # not every node has a place; these do
    first = min([where, *getattr(node, "decorator_list", [])], key=lambda found: found.lineno)
    return (first.lineno, max(0, first.col_offset - 1)), (where.end_lineno, where.end_col_offset)
