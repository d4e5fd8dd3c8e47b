"""The language of triggers: conditions on what a step has recorded and logged, parsed by `ast` and never evaluated by
Python.

    n_nan > 0
    kind == 'grad_output' and l2 > 1e4
    loss > 3 * median(loss, 100)
    like(layer, 'blocks.0.*') and absmax > 6e4 or scalar('train/loss') != scalar('train/loss')

Names of columns stand for the records of a step, any other name for a number that was given to `rec.log`. A condition
is compiled to functions on arrays: on columns it has a value a record, on numbers one value. What depends on a number
that the step does not have is unknown, and an unknown condition does not fire.

The training process checks what the user wrote, the writer process judges each step by it.
"""

import ast
import difflib
import fnmatch
import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from hookrec.errors import AttachError

NUMBERS = (
    *("numel", "n_nan", "n_posinf", "n_neginf", "n_zero", "min", "max", "absmax", "mean", "std", "l2"),
    *("step", "call", "micro", "nbytes"),
)
TEXTS = ("layer", "kind", "path", "dtype", "mode")
COLUMNS = (*NUMBERS, *TEXTS)
OVER_VALUES: dict[str, Callable[[Any], Any]] = {"median": np.median, "mean": np.mean, "max": np.max, "min": np.min}
OF_ONE: dict[str, Callable[[Any], Any]] = {"abs": np.abs, "isnan": np.isnan, "isfinite": np.isfinite}
_LONGEST = 10_000
_LONGEST_HISTORY = 100_000

_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: np.add,
    ast.Sub: np.subtract,
    ast.Mult: np.multiply,
    ast.Div: np.divide,
    ast.Mod: np.mod,
    ast.Pow: np.power,
}
_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
}


@dataclass(frozen=True)
class Judged:
    """A step as conditions see it.

    Attributes:
        columns: of each column an array of shape `(records,)`.
        scalars: the numbers that were logged, by name.
        earlier: of each number its values in earlier steps, the last one at the end.
    """

    columns: Mapping[str, NDArray[Any]]
    scalars: Mapping[str, float]
    earlier: Mapping[str, Sequence[float]]


Function = Callable[[Judged], Any]


@dataclass(frozen=True)
class _Value:
    """A part of a condition: "number", "text" or "truth", and how to compute it; None where it is unknown."""

    kind: str
    of: Function


class Condition:
    """A condition.

    Args:
        text: what the user wrote.

    Attributes:
        text: the same.
        columns: names of the columns that it asks for.
        scalars: names of the logged numbers that it asks for, and how many earlier values of each.

    Raises:
        AttachError: it is none; says where and why, and which columns there are.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.columns: set[str] = set()
        self.scalars: dict[str, int] = {}
        self._source = " ".join(text.splitlines()).strip()
        try:
            tree = self._parse()
            value = self._compile(tree.body)
        except (RecursionError, MemoryError):
            self._refuse(None, "it is nested too deeply")
        if value.kind != "truth":
            self._refuse(tree.body, f"it is a {value.kind} and no condition; compare it with something")
        self._value = value.of

    def judge(self, step: Judged) -> NDArray[np.bool_] | None:
        """Return whether it holds: shape `(records,)` if it asks for columns, else `()`; None if that is unknown."""
        with np.errstate(all="ignore"):
            value = self._value(step)
        return None if value is None else np.asarray(value, np.bool_)

    def _parse(self) -> ast.Expression:
        if len(self._source) > _LONGEST:
            self._refuse(None, f"it is longer than {_LONGEST:,} characters")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                return ast.parse(self._source, mode="eval")
        except (SyntaxError, ValueError) as error:
            hint = ""
            if "=" in self._source and not any(sign in self._source for sign in ("==", "!=", "<=", ">=")):
                hint = "; equality is =="
            where = (getattr(error, "offset", None) or len(self._source) + 1) - 1  # 0 is the end
            self._refuse(where, f"{getattr(error, 'msg', error)}{hint}")

    def _refuse(self, where: ast.AST | int | None, why: str) -> NoReturn:
        if isinstance(where, ast.AST):
            # Python counts bytes.
            where = len(self._source.encode()[: getattr(where, "col_offset", 0)].decode(errors="ignore"))
        before = "" if where is None else self._source[where : where + 20]
        place = "" if where is None else f" at position {where + 1}, before {before!r}" if before else " at its end"
        raise AttachError(
            f"The trigger {self.text[:200]!r} cannot be understood{place}: {why}. "
            f"Columns are {', '.join(COLUMNS)}; other names are numbers given to rec.log(). Functions are "
            f"{', '.join(f'{name}(number, n)' for name in OVER_VALUES)}, {', '.join(f'{name}(x)' for name in OF_ONE)}, "
            "like(layer, 'glob'), scalar('name'). Write for example \"n_nan > 0\" or \"loss > 3 * median(loss, 100)\"."
        )

    def _compile(self, node: ast.expr) -> _Value:
        match node:
            case ast.BoolOp():
                return self._junction(node)
            case ast.UnaryOp(op=ast.Not()):
                return _Value("truth", _known(np.logical_not, self._typed(node.operand, "truth")))
            case ast.UnaryOp(op=ast.USub()):
                return _Value("number", _known(np.negative, self._typed(node.operand, "number")))
            case ast.UnaryOp(op=ast.UAdd()):
                return _Value("number", self._typed(node.operand, "number"))
            case ast.BinOp():
                return self._arithmetic(node)
            case ast.Compare():
                return self._comparison(node)
            case ast.Call():
                return self._call(node)
            case ast.Name(id=name):
                return self._name(node, name)
            case ast.Constant(value=bool()):
                self._refuse(node, "there are no true and false; write a comparison")
            case ast.Constant(value=int() | float() as number):
                try:
                    constant = np.float64(number)
                except OverflowError:
                    self._refuse(node, "the number is too large")
                return _Value("number", lambda step: constant)
            case ast.Constant(value=str() as text):
                return _Value("text", lambda step: text)
        return self._refuse(node, f"{type(node).__name__.lower()} is not part of the language")

    def _typed(self, node: ast.expr, kind: str) -> Function:
        value = self._compile(node)
        if value.kind != kind:
            wanted = {"truth": "a condition", "number": "a number", "text": "a text"}
            self._refuse(node, f"this is {wanted[value.kind]}, where {wanted[kind]} belongs")
        return value.of

    def _junction(self, node: ast.BoolOp) -> _Value:
        parts = [self._typed(value, "truth") for value in node.values]
        either = isinstance(node.op, ast.Or)

        def junction(step: Judged) -> Any:
            values = [part(step) for part in parts]
            known = [value for value in values if value is not None]
            if not known or (len(known) < len(values) and not either):
                return None
            join = np.logical_or if either else np.logical_and
            result = known[0]
            for value in known[1:]:
                result = join(result, value)
            return result

        return _Value("truth", junction)

    def _arithmetic(self, node: ast.BinOp) -> _Value:
        function = _ARITHMETIC.get(type(node.op))
        if function is None:
            hint = {ast.BitAnd: "; write 'and'", ast.BitOr: "; write 'or'"}.get(type(node.op), "")
            self._refuse(node, f"{type(node.op).__name__.lower()} is not part of the language{hint}")
        return _Value("number", _known(function, self._typed(node.left, "number"), self._typed(node.right, "number")))

    def _comparison(self, node: ast.Compare) -> _Value:
        pairs = []
        for left, sign, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False):
            value = self._compile(left)
            if value.kind == "truth":
                self._refuse(left, "this is a condition, where a number or a text belongs")
            if isinstance(sign, (ast.In, ast.NotIn)):
                pairs.append(self._membership(left, value, right, isinstance(sign, ast.NotIn)))
                continue
            function = _COMPARISONS.get(type(sign))
            if function is None:
                self._refuse(right, "write == or !=")
            if value.kind == "text" and not isinstance(sign, (ast.Eq, ast.NotEq)):
                self._refuse(left, "texts are compared by ==, != and like()")
            pairs.append(_known(function, value.of, self._typed(right, value.kind)))
        return _Value("truth", _known(lambda *found: np.logical_and.reduce(np.broadcast_arrays(*found)), *pairs))

    def _membership(self, left: ast.expr, value: _Value, right: ast.expr, negated: bool) -> Function:
        if not isinstance(right, (ast.Tuple, ast.List, ast.Set)):
            self._refuse(right, "'in' takes several values in parentheses")
        choices = [self._typed(choice, value.kind) for choice in right.elts]

        def member(step: Judged) -> Any:
            found = value.of(step)
            options = [choice(step) for choice in choices]
            if found is None or any(option is None for option in options):
                return None
            result = np.zeros(np.shape(found), np.bool_)
            for option in options:
                result = result | (found == option)
            return ~result if negated else result

        return member

    def _call(self, node: ast.Call) -> _Value:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if node.keywords or any(isinstance(argument, ast.Starred) for argument in node.args):
            self._refuse(node, "functions take values alone")
        if name in OF_ONE and len(node.args) == 1:
            kind = "number" if name == "abs" else "truth"
            return _Value(kind, _known(OF_ONE[name], self._typed(node.args[0], "number")))
        if name in OVER_VALUES:
            return self._over_values(node, name)
        if name == "scalar" and len(node.args) == 1:
            return self._scalar(self._literal(node.args[0], str, "the name of a number in quotes"))
        if name == "like" and len(node.args) == 2:
            text = self._typed(node.args[0], "text")
            glob = self._literal(node.args[1], str, "a glob in quotes")
            return _Value("truth", _known(lambda found: _matches(found, glob), text))
        known = [*OVER_VALUES, *OF_ONE, "scalar", "like"]
        many = f"takes {'one value' if name in (*OF_ONE, 'scalar') else 'two'}" if name in known else "is no function"
        return self._refuse(node, f"{name or 'this'} {many}")

    def _over_values(self, node: ast.Call, name: str) -> _Value:
        scalar = None
        match node.args:
            case [ast.Name(id=found), _] if found not in COLUMNS:
                scalar = found
            case [ast.Call(func=ast.Name(id="scalar"), args=[argument]), _]:
                scalar = self._literal(argument, str, "the name of a number in quotes")
        if scalar is None:
            self._refuse(
                node, f"{name}() takes the name of a logged number and how many of its values, as in {name}(loss, 100)"
            )
        count = self._literal(node.args[1], int, "a whole number of values")
        if not 1 <= count <= _LONGEST_HISTORY:
            self._refuse(node.args[1], f"the number of values is from 1 to {_LONGEST_HISTORY:,}")
        self._scalar(scalar, count)
        function = OVER_VALUES[name]

        def over(step: Judged) -> Any:
            earlier = step.earlier.get(scalar, ())
            if scalar not in step.scalars or len(earlier) < count:
                return None
            return np.float64(function(np.asarray(earlier[-count:], np.float64)))

        return _Value("number", over)

    def _literal(self, node: ast.expr, kind: type, what: str) -> Any:
        if not isinstance(node, ast.Constant) or type(node.value) is not kind:
            self._refuse(node, f"here belongs {what}")
        return node.value

    def _name(self, node: ast.Name, name: str) -> _Value:
        if name in COLUMNS:
            self.columns.add(name)
            return _Value("number" if name in NUMBERS else "text", lambda step: step.columns[name])
        near = difflib.get_close_matches(name, COLUMNS, n=1, cutoff=0.8)
        if near:
            self._refuse(
                node, f"there is no column {name!r}, but {near[0]!r}; a logged number of that name is scalar({name!r})"
            )
        return self._scalar(name)

    def _scalar(self, name: str, count: int = 0) -> _Value:
        self.scalars[name] = max(self.scalars.get(name, 0), count)
        return _Value("number", lambda step: np.float64(step.scalars[name]) if name in step.scalars else None)


def _known(function: Callable[..., Any], *arguments: Function) -> Function:
    """A function of arguments that is unknown where one of them is."""

    def call(step: Judged) -> Any:
        values = [argument(step) for argument in arguments]
        return None if any(value is None for value in values) else function(*values)

    return call


def _matches(found: Any, glob: str) -> Any:
    if isinstance(found, str):
        return np.bool_(fnmatch.fnmatchcase(found, glob))
    known = {name: fnmatch.fnmatchcase(name, glob) for name in set(found.tolist())}
    return np.array([known[name] for name in found.tolist()], np.bool_)
