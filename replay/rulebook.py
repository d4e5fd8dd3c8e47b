"""What a rule is, and where rules come from: this package, other packages, files of the user.

A rule is a function that is given the records and yields what it has seen. Its thresholds are its keyword arguments,
so their names and defaults stand once, in its signature, and where they come from stands in its docstring.
"""

import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from replay.errors import BadQuery
from replay.grid import Seen

SEVERITIES = ("error", "warning")
ENTRY_POINTS = "replay.rules"


@dataclass(frozen=True)
class Rule:
    """Finds one kind of trouble in a training. Made by the decorator `rule`.

    Attributes:
        name: the function's, with hyphens.
        severity: "error" for what has broken the training, "warning" for what deserves a look.
        advice: a sentence: what to do about it.
        thresholds: names and defaults; the first is meant where none is named.
        look: the function.
    """

    name: str
    severity: str
    advice: str
    thresholds: Mapping[str, float]
    look: Callable[..., Iterable[Seen]]

    @property
    def doc(self) -> str:
        """What the rule finds, and which paper or practice it is from."""
        return inspect.getdoc(self.look) or ""


def rule(*, severity: str = "warning", advice: str, name: str | None = None) -> Callable[[Callable[..., Any]], Rule]:
    """Make a rule of a function that takes `Records` and yields `Seen`, and whose keyword arguments are thresholds.

    Args:
        severity: "error" or "warning".
        advice: a sentence: what to do about it.
        name: the name of the rule; the function's, with hyphens, if None.

    Raises:
        BadQuery: a threshold has no default that is a number, or there is no such severity.
    """
    if severity not in SEVERITIES:
        raise BadQuery(f"There is no severity {severity!r}; there are {', '.join(map(repr, SEVERITIES))}.")

    def make(function: Callable[..., Any]) -> Rule:
        parameters = list(inspect.signature(function).parameters.values())[1:]
        for parameter in parameters:
            number = isinstance(parameter.default, (int, float)) and not isinstance(parameter.default, bool)
            if parameter.kind is not parameter.KEYWORD_ONLY or not number:
                raise BadQuery(
                    f"The argument {parameter.name!r} of rule {function.__name__!r} is no threshold: it must be a "
                    "keyword argument with a number as its default, as in def my_rule(records, *, limit=1e3)."
                )
        thresholds = {parameter.name: parameter.default for parameter in parameters}
        return Rule(name or function.__name__.replace("_", "-"), severity, advice, thresholds, function)

    return make


def rules_of_file(path: str | Path) -> list[Rule]:
    """Run a Python file and return the rules that it makes.

    The file is run as it is, with all rights of this process: only give it files that you trust.

    Raises:
        BadQuery: the file cannot be run, or makes no rule.
    """
    path = Path(path)
    if not path.is_file():
        what = "is a directory" if path.is_dir() else "does not exist"
        raise BadQuery(f"The file of rules {path} {what}. Give it a Python file with functions under @replay.rule(…).")
    spec = importlib.util.spec_from_file_location(f"replay_rules_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise BadQuery(f"The file of rules {path} is no Python file: its name does not end in .py.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        raise BadQuery(f"The file of rules {path} cannot be run: {type(error).__name__}: {error}{where}") from error
    return _rules_in(vars(module).values(), f"The file of rules {path}")


def installed_rules() -> list[Rule]:
    """Return the rules that installed packages offer by entry points of the group `replay.rules`.

    An entry point names a rule, or a module with rules in it.

    Raises:
        BadQuery: an entry point cannot be loaded, or has no rule.
    """
    found: list[Rule] = []
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        what = f"The entry point {entry.name!r} ({entry.value})"
        try:
            loaded = entry.load()
        except Exception as error:
            raise BadQuery(f"{what} cannot be loaded: {type(error).__name__}: {error}") from error
        found += _rules_in([loaded] if isinstance(loaded, Rule) else getattr(loaded, "__dict__", {}).values(), what)
    return found


def _rules_in(values: Iterable[object], where: str) -> list[Rule]:
    found = [value for value in values if isinstance(value, Rule)]
    if not found:
        raise BadQuery(f"{where} has no rule. A rule is a function under @replay.rule(severity=…, advice=…).")
    return found


def with_thresholds(rules: Iterable[Rule], thresholds: Mapping[str, float]) -> Iterator[tuple[Rule, dict[str, float]]]:
    """Yield each rule with the values of its thresholds.

    Args:
        rules: the rules.
        thresholds: by "rule", which means its first threshold, or "rule.threshold".

    Raises:
        BadQuery: a name is no rule, or no threshold of its rule, or a value is no number.
    """
    known = {name: (rule, dict(rule.thresholds)) for name, rule in by_name(rules).items()}
    for key, value in thresholds.items():
        name, _, threshold = key.partition(".")
        if name not in known:
            raise BadQuery(f"There is no rule {name!r}. {near(name, known)}")
        _, values = known[name]
        threshold = threshold or next(iter(values), "")
        if threshold not in values:
            there = ", ".join(f"{name}.{each}" for each in values) or "none"
            raise BadQuery(f"There is no threshold {key!r}. Those of the rule are: {there}.")
        values[threshold] = _number(key, value, values[threshold])
    yield from known.values()


def by_name(rules: Iterable[Rule]) -> dict[str, Rule]:
    """Return rules by their names.

    Raises:
        BadQuery: two have the same.
    """
    known: dict[str, Rule] = {}
    for each in rules:
        if each.name in known:
            raise BadQuery(f"There are two rules named {each.name!r}. Give one another name: @replay.rule(name=…).")
        known[each.name] = each
    return known


def _number(key: str, value: object, default: float) -> float:
    """Return the value of a threshold; a whole number where its default is one, as numbers of steps are."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or value != value:
        raise BadQuery(f"The threshold {key!r} is {value!r}; it takes a number.")
    if isinstance(default, float):
        return float(value)
    if not 0 <= value < 2**31 or value != int(value):
        raise BadQuery(f"The threshold {key!r} is {value!r}; it takes a whole number from 0 on.")
    return int(value)


def near(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the names that are like this one, or with all."""
    import difflib

    names = list(known)
    return f"There are {', '.join(difflib.get_close_matches(name, names, 3) or names)}."


def source_of(rule: Rule) -> str:
    """Return the paper or practice that the rule is from, as the end of its docstring says."""
    found = re.search(r"^Source: (.*)", rule.doc, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""
