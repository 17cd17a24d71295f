"""Formulas over attributes: checked once when the table is loaded, evaluated for every task (A2).

The language is arithmetic and a choice: numbers, attributes, ``+ - * / // % **``, the functions below,
and ``A if CONDITION else B``, where a condition compares numbers, compares for equality with a text
(``model == "large"``), or tests a flag (``fp16``), joined by ``and or not``. ``len(name)`` is the length
of a text or list. Everything else is refused by name. Arithmetic is in floats, so nothing can grow
without bound, and `simpleeval` does the evaluation.
"""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Flag, auto
from typing import Any, NoReturn

import simpleeval

from brim.core.attributes import EstimateError, shorten
from brim.core.model import Reason

MAX_CHARACTERS = 1000
MAX_DEPTH = 40
"""Nesting of the expression; keeps evaluation far from the interpreter's recursion limit."""
MAX_VALUE = 1e15
"""The largest number that an attribute may have: below it, floats count whole numbers exactly."""


class Use(Flag):
    """How a formula uses a name, which decides the values that the attribute may have."""

    NUMBER = auto()
    """In arithmetic or an order: a finite number ≥ 0."""
    CONDITION = auto()
    """As a flag: a bool or such a number."""
    EQUALITY = auto()
    """Compared by == or !=: any scalar."""
    LENGTH = auto()
    """Inside len(): a text or a list."""


class FormulaError(ValueError):
    """A formula that the table must not contain; the message says what is wrong with it."""


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a formula that depends on attributes."""

    sign: float
    node: ast.expr


@dataclass(frozen=True, slots=True, eq=False)
class Formula:
    """A checked formula: a sum of a constant and of terms over attributes. Equal texts make equal formulas."""

    text: str
    uses: Mapping[str, Use]
    """Each attribute that it needs, and how it is used."""
    constant: float
    """What its outermost sum adds whatever the attributes are."""
    terms: tuple[Term, ...]
    """The other summands of its outermost sum, in the order of the text."""

    @classmethod
    def parse(cls, text: str) -> Formula:
        """Check and parse a formula; raises ``FormulaError``."""
        if len(text) > MAX_CHARACTERS:
            raise FormulaError(f"a formula has at most {MAX_CHARACTERS} characters, this one {len(text)}")
        if not text.strip():
            raise FormulaError("the formula is empty")
        try:
            tree = ast.parse(text.strip(), mode="eval").body
        except SyntaxError as error:
            raise FormulaError(f"syntax error in {shorten(text)!r}: {error.msg}") from None
        except (ValueError, RecursionError, MemoryError) as error:
            raise FormulaError(f"{shorten(text)!r} cannot be parsed: {error}") from None
        check = _Check(text)
        check.number(tree)
        summands = list(_summands(tree, 1.0))
        terms = tuple(Term(sign, node) for sign, node in summands if _has_names(node))
        try:
            constant = sum(sign * _evaluate(node, {}, text) for sign, node in summands if not _has_names(node))
        except (ArithmeticError, ValueError) as error:
            raise FormulaError(f"{shorten(text)!r} cannot be evaluated: {error}") from None
        if not math.isfinite(constant) or (constant < 0 and not terms):
            raise FormulaError(f"{shorten(text)!r} gives {constant:g}, which is no amount")
        return cls(text, check.uses, float(constant), terms)

    def evaluate(self, attributes: Mapping[str, object]) -> float:
        """The formula's value: finite and ≥ 0.

        Raises ``EstimateError`` with code ``missing_attribute``, ``bad_attribute`` or ``bad_estimate``.
        """
        return sum(self.summands(attributes))

    def summands(self, attributes: Mapping[str, object]) -> tuple[float, ...]:
        """The constant and the value of each term, which add up to the formula's value.

        Raises as ``evaluate`` does.
        """
        values = {name: self._value(name, use, attributes) for name, use in self.uses.items()}
        try:
            found = [term.sign * _evaluate(term.node, values, self.text) for term in self.terms]
        except (ArithmeticError, ValueError) as error:
            self._fail(f"cannot be evaluated: {error}", attributes)
        result = sum(found, self.constant)
        if not math.isfinite(result):
            self._fail("gives no finite number", attributes)
        if result < 0:
            self._fail(f"gives {result:g}, which is negative", attributes)
        return (self.constant, *found)

    def inputs(self, attributes: Mapping[str, Any]) -> dict[str, float | str]:
        """What the formula reads from attributes that it can evaluate, for people; lengths stand as ``len(name)``."""
        found: dict[str, float | str] = {}
        for name, use in self.uses.items():
            value = attributes[name]
            if Use.LENGTH in use:
                found[f"len({name})"] = len(value)
            else:
                found[name] = shorten(value) if isinstance(value, str) else value
        return found

    def rescaled(self, constant: float, factors: Sequence[float]) -> Formula:
        """The same formula with another constant and each term multiplied by its factor (all ≥ 0)."""
        summands = [f"{constant:.0f}"] if round(constant) or not self.terms else []
        for term, factor in zip(self.terms, factors, strict=True):
            sign = ("-" if term.sign < 0 else "") if not summands else ("- " if term.sign < 0 else "+ ")
            summands.append(sign + _scaled_text(term.node, factor))
        return Formula.parse(" ".join(summands))

    def _value(self, name: str, use: Use, attributes: Mapping[str, object]) -> object:
        if name not in attributes:
            message = f"attribute '{name}' is missing: the formula {self.text!r} needs it"
            raise EstimateError(Reason("missing_attribute", message))
        value = attributes[name]
        problem = _problem(value, use)
        if problem:
            raise EstimateError(Reason("bad_attribute", f"attribute '{name}' {problem} (is {show(value)})"))
        return float(value) if type(value) is int else value

    def _fail(self, problem: str, attributes: Mapping[str, object]) -> NoReturn:
        given = ", ".join(f"{name}={show(attributes[name])}" for name in self.uses)
        message = f"the formula {self.text!r} {problem}" + (f", with {given}" if given else "")
        raise EstimateError(Reason("bad_estimate", message))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Formula) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __str__(self) -> str:
        return self.text


def show(value: object) -> str:
    """A value for a message, short whatever it is."""
    if isinstance(value, int) and abs(value) > MAX_VALUE:
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, bool | int | float | str):
        return shorten(repr(value))
    return "nothing" if value is None else f"a {type(value).__name__}"


def _problem(value: object, use: Use) -> str | None:
    """Why the value does not suit one of its uses."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if Use.LENGTH in use and not isinstance(value, str | list | tuple):
        return "must be a text or a list"
    if Use.EQUALITY in use and not isinstance(value, str | bool | int | float):
        return "must be a number, a text or a flag"
    if Use.NUMBER in use and not number:
        return "must be a number"
    if Use.CONDITION in use and not number and not isinstance(value, bool):
        return "must be true, false or a number"
    if isinstance(value, int | float) and not 0 <= value <= MAX_VALUE:
        return f"must be a finite number from 0 to {MAX_VALUE:g}"
    return None


class _Check:
    """Walks an expression once: refuses what the language lacks and notes how each name is used."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.uses: dict[str, Use] = {}
        self.depth = 0

    def number(self, node: ast.expr) -> None:
        """Check a part that must give a number."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise FormulaError(f"the formula is nested deeper than {MAX_DEPTH} levels")
        match node:
            case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
                node.value = _literal(value)
            case ast.Name(id=name):
                self._use(name, Use.NUMBER)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
                self.number(operand)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                self.number(left)
                self.number(right)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                self.condition(test)
                self.number(body)
                self.number(orelse)
            case ast.Call():
                self._call(node)
            case ast.Compare() | ast.BoolOp() | ast.UnaryOp(op=ast.Not()):
                self._refuse(node, "is a condition; write 'A if CONDITION else B' to make a number of it")
            case _:
                self._refuse(node, "is not part of the formula language")
        self.depth -= 1

    def condition(self, node: ast.expr) -> None:
        """Check a part that must give yes or no."""
        match node:
            case ast.Name(id=name):
                self._use(name, Use.CONDITION)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                self._nested(operand)
            case ast.BoolOp(values=values):
                for value in values:
                    self._nested(value)
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                equality = all(isinstance(op, ast.Eq | ast.NotEq) for op in ops)
                if not equality and any(type(op) not in _ORDER for op in ops):
                    self._refuse(node, "compares by something else than == != < <= > >=")
                for side in (left, *comparators):
                    self._side(side, equality)
            case _:
                self.number(node)

    def _nested(self, node: ast.expr) -> None:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise FormulaError(f"the formula is nested deeper than {MAX_DEPTH} levels")
        self.condition(node)
        self.depth -= 1

    def _side(self, node: ast.expr, equality: bool) -> None:
        """One side of a comparison; texts and flags are comparable only for equality."""
        match node:
            case ast.Name(id=name) if equality:
                self._use(name, Use.EQUALITY)
            case ast.Constant(value=str() | bool()) if equality:
                pass
            case _:
                self.number(node)

    def _call(self, node: ast.Call) -> None:
        if not isinstance(node.func, ast.Name):
            self._refuse(node, "calls something else than a function by its name")
        name = node.func.id
        if name not in FUNCTIONS:
            raise FormulaError(f"unknown function '{shorten(name)}'; there are {', '.join(FUNCTIONS)}")
        fewest, most = _ARITY[name]
        if node.keywords or not fewest <= len(node.args) <= most:
            wanted = "one argument" if most == 1 else "two or more arguments"
            raise FormulaError(f"function '{name}' takes {wanted} by position")
        for argument in node.args:
            if name != "len":
                self.number(argument)
            elif isinstance(argument, ast.Name):
                self._use(argument.id, Use.LENGTH)
            else:
                raise FormulaError("function 'len' takes the name of an attribute")

    def _use(self, name: str, use: Use) -> None:
        if name in FUNCTIONS:
            raise FormulaError(f"function '{name}' is used like an attribute")
        self.uses[name] = self.uses.get(name, use) | use

    def _refuse(self, node: ast.expr, problem: str) -> NoReturn:
        part = ast.get_source_segment(self.text.strip(), node) or type(node).__name__
        raise FormulaError(f"{shorten(part)!r} {problem}")


def _summands(node: ast.expr, sign: float) -> Iterator[tuple[float, ast.expr]]:
    """The signed parts of an outermost sum, from left to right."""
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
            yield from _summands(left, sign)
            yield from _summands(right, -sign if isinstance(op, ast.Sub) else sign)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            yield from _summands(operand, -sign)
        case _:
            yield sign, node


def _has_names(node: ast.expr) -> bool:
    return any(isinstance(part, ast.Name) and part.id not in FUNCTIONS for part in ast.walk(node))


def _evaluate(node: ast.expr, values: Mapping[str, object], text: str) -> float:
    token = _names.set(values)
    try:
        return float(_EVALUATOR.eval(text, node))
    finally:
        _names.reset(token)


def _scaled_text(node: ast.expr, factor: float) -> str:
    """A term multiplied by a factor, which joins the number that the term begins with, if there is one."""
    match node:
        case ast.BinOp(left=ast.Constant(value=float() as value), op=ast.Mult(), right=right):
            return f"{_short(value * factor)} * {_factor_text(right)}"
        case ast.BinOp(left=ast.BinOp(op=ast.Mult()) as left, op=ast.Mult() | ast.Div() as op, right=right):
            symbol = "*" if isinstance(op, ast.Mult) else "/"
            return f"{_scaled_text(left, factor)} {symbol} {_factor_text(right)}"
    return f"{_short(factor)} * {_factor_text(node)}"


def _factor_text(node: ast.expr) -> str:
    simple = isinstance(node, ast.Name | ast.Call | ast.Constant) or (
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)
    )
    return _plain(node) if simple else f"({_plain(node)})"


def _plain(node: ast.expr) -> str:
    """The node's source, with the whole numbers that checking made floats written as whole numbers."""
    return re.sub(r"(?<![\w.])(\d+)\.0(?![\w.])", r"\1", ast.unparse(node))


def _short(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.0f}"


def _literal(value: int | float) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise FormulaError("a number in the formula is too large")
    return number


def _float_result(function: Callable[[float], int]) -> Callable[[float], float]:
    """Keep whole results floats: an int could be multiplied beyond any bound."""
    return lambda value: float(function(value))


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min,
    "max": max,
    "ceil": _float_result(math.ceil),
    "floor": _float_result(math.floor),
    "log2": math.log2,
    "round": _float_result(round),
    "len": _float_result(len),  # type: ignore[arg-type]
}
_ARITY = dict.fromkeys(FUNCTIONS, (1, 1)) | {"min": (2, MAX_CHARACTERS), "max": (2, MAX_CHARACTERS)}
_ARITHMETIC: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: math.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_ORDER: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Not: operator.not_,
}

_names: ContextVar[Mapping[str, object]] = ContextVar("formula_names")
"""The attributes of the evaluation under way; a context variable, so that threads do not mix them up."""
_EVALUATOR = simpleeval.SimpleEval(
    operators=_ARITHMETIC | _ORDER, functions=FUNCTIONS, names=lambda node: _names.get()[node.id]
)
