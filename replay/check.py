"""Runs rules over a trace and puts what they find into an order in which the first is the most probable cause.

Errors come before warnings. Trouble spreads: forwards to the layers behind, backwards by the gradients, on to the
next step by the optimizer. So what came first, in step and in order of execution, is likelier to be the cause of the
rest.

A rule that cannot judge says why, and the report has it: silence always means that a rule looked and found nothing.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from replay.errors import BadQuery, ReplayError
from replay.grid import NotApplicable, Records, Seen
from replay.rulebook import SEVERITIES, Rule, by_name, installed_rules, near, with_thresholds
from replay.rules import RULES
from replay.trace import Trace


@dataclass(frozen=True)
class Finding:
    """Something that is wrong with a training.

    (rule, rank, layer, kind) stays the same while a trace grows, so it tells whether a finding is new.

    Attributes:
        rule: name of the rule that found it.
        severity: "error" or "warning".
        rank: the process.
        first_step: the first step in which it was so, of those that were looked at.
        last_step: the last.
        layer: qualified module name; None where it is about no layer.
        kind: kind of the records; the name of the scalar where it is about no layer; None where it is about neither.
        message: a sentence with the layer, the steps and the number.
        advice: what to do about it.
    """

    rule: str
    severity: str
    rank: int
    first_step: int
    last_step: int
    layer: str | None
    kind: str | None
    message: str
    advice: str


@dataclass(frozen=True)
class Report:
    """What came of running rules.

    Attributes:
        findings: the most probable cause first.
        quiet: the rules that looked and found nothing.
        not_applicable: by name, the rules that could not judge, and why.
    """

    findings: list[Finding]
    quiet: list[str]
    not_applicable: dict[str, str]


def check(
    trace: Trace,
    *,
    rules: Iterable[Rule] | None = None,
    thresholds: Mapping[str, float] | None = None,
    since: int | None = None,
) -> list[Finding]:
    """Find what is wrong with a training.

    Args:
        trace: the trace, which may be live: what it has seen at its last `refresh()` is looked at.
        rules: those to run; all of this package and of installed ones if None.
        thresholds: other values of thresholds, by "rule" or "rule.threshold".
        since: only what was so at this step or later. Earlier steps are read as background as far as is needed, so
            that asking again and again costs little, however long the trace is.

    Returns:
        What was found, the most probable cause first.

    Raises:
        BadQuery: a threshold or a rule that does not exist.
        TraceDamaged: a file of the trace is not what the format says.
    """
    return examine(trace, rules=rules, thresholds=thresholds, since=since).findings


def examine(
    trace: Trace,
    *,
    rules: Iterable[Rule] | None = None,
    thresholds: Mapping[str, float] | None = None,
    since: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Run rules as `check` does, and say of each rule what came of it.

    Args:
        trace: as of `check`.
        rules: as of `check`.
        thresholds: as of `check`.
        since: as of `check`.
        progress: is told again and again how many rules of how many are done.
    """
    if since is not None and since < 0:
        raise BadQuery(f"since={since} is no step: steps count from 0.")
    chosen = list(with_thresholds(all_rules() if rules is None else rules, thresholds or {}))
    done = 0

    def told() -> None:
        if progress is not None:
            progress(done, len(chosen))

    records = Records(trace, since, told)
    findings: list[Finding] = []
    quiet: list[str] = []
    not_applicable: dict[str, str] = {}
    for done, (rule, values) in enumerate(chosen):  # noqa: B007 - `told` tells it
        told()
        try:
            seen = _look(rule, records, values)
        except NotApplicable as reason:
            not_applicable[rule.name] = str(reason)
            continue
        except ReplayError:
            raise
        except Exception as error:
            # A rule that breaks must not hide what the others find, and must not pass for one that found nothing.
            findings.append(_broken(rule, records, error))
            continue
        found = [_finding(rule, each) for each in seen if since is None or each.last_step >= since]
        findings += found
        if not found:
            quiet.append(rule.name)
    return Report(sorted(findings, key=_order(records)), quiet, not_applicable)


def _look(rule: Rule, records: Records, thresholds: Mapping[str, float]) -> list[Seen]:
    if not records.count:
        raise NotApplicable("no step is committed yet")
    with np.errstate(all="ignore"):  # NaN stands for what was not recorded
        seen = list(rule.look(records, **thresholds))
    for each in seen:
        if not isinstance(each, Seen):
            raise TypeError(f"it yields a {type(each).__name__}, where what grid.seen(…) returns belongs")
    return seen


def all_rules() -> list[Rule]:
    """Return the rules of this package and those of installed packages."""
    return [*RULES, *installed_rules()]


def choose(rules: Iterable[Rule], only: Iterable[str] = (), skip: Iterable[str] = ()) -> list[Rule]:
    """Return some of the rules, by name.

    Raises:
        BadQuery: there is no rule of that name, or there are two.
    """
    known = by_name(rules)
    for name in (*only, *skip):
        if name not in known:
            raise BadQuery(f"There is no rule {name!r}. {near(name, known)}")
    wanted, unwanted = set(only) or set(known), set(skip)
    return [rule for name, rule in known.items() if name in wanted - unwanted]


def _finding(rule: Rule, seen: Seen) -> Finding:
    when = seen.first_step, seen.last_step
    return Finding(rule.name, rule.severity, seen.rank, *when, seen.layer, seen.kind, seen.message, rule.advice)


def _broken(rule: Rule, records: Records, error: Exception) -> Finding:
    when = int(records.steps[0]), int(records.steps[-1])
    message = f"The rule {rule.name} itself is broken: {type(error).__name__}: {error}"
    advice = "Mend the rule, or leave it out."
    return Finding(rule.name, rule.severity, records.trace.ranks[0], *when, None, None, message, advice)


def _order(records: Records) -> Any:
    positions: dict[tuple[int, str | None, str | None], int] = {}
    for place in records.places:
        positions.setdefault((place.rank, place.layer, place.kind), place.order)

    def key(finding: Finding) -> tuple[Any, ...]:
        # What is about no layer, such as a loss, comes out at the end of a forward pass: behind all layers.
        position = positions.get((finding.rank, finding.layer, finding.kind), records.count)
        return SEVERITIES.index(finding.severity), finding.first_step, position, finding.rank, finding.rule

    return key
