"""The command `replay check`: findings as text for people and as JSON for programs, and what its exit status means."""

import dataclasses
import shutil
import sys
import textwrap
from collections.abc import Iterable
from pathlib import Path

import click

import replay
from replay.check import Finding, Report, all_rules, choose, examine
from replay.command_line import attempt_option, json_option, print_json, progress, say, trace_argument
from replay.printable import printable
from replay.rulebook import SEVERITIES, rules_of_file

_EXAMPLES = """\b
Examples:
  replay check runs/a
  replay check runs/a --threshold dead-relu=0.95 --threshold vanishing-gradients.steps=20
  replay check runs/a --skip loss-not-falling --fail-on error
  replay check runs/a --rules my_rules.py --json
  replay check runs/a --only non-finite --since 48000

\b
Exit status:
  0  nothing was found of the severity that --fail-on names, or above
  1  something was
  2  the question cannot be understood, or the trace cannot be read

A file of rules is run with all your rights: only give one that you trust. docs/check.md lists the rules, and says how
to write one."""


@click.command(epilog=_EXAMPLES)
@trace_argument
@click.option(
    "--rules",
    "files",
    multiple=True,
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="Python file with more rules, which is run; may be repeated.",
)
@click.option(
    "--threshold",
    "thresholds",
    multiple=True,
    metavar="NAME=VALUE",
    help="Another threshold: rule=value, or rule.threshold=value; may be repeated.",
)
@click.option("--only", multiple=True, metavar="RULE", help="Run this rule; may be repeated.")
@click.option("--skip", multiple=True, metavar="RULE", help="Do not run this rule; may be repeated.")
@click.option("--since", type=click.IntRange(0, 2**62), help="Only what was so at this step or later.")
@attempt_option
@click.option(
    "--fail-on",
    type=click.Choice([*SEVERITIES, "never"]),
    default="warning",
    show_default=True,
    help="From which severity on the exit status is 1.",
)
@click.option("-v", "--verbose", is_flag=True, help="Name the rules that found nothing, and why others do not apply.")
@json_option
def check(
    trace: Path,
    files: tuple[Path, ...],
    thresholds: tuple[str, ...],
    only: tuple[str, ...],
    skip: tuple[str, ...],
    since: int | None,
    attempt: int | None,
    fail_on: str,
    verbose: bool,
    as_json: bool,
) -> None:
    """Find what is wrong with a training, the most probable cause first."""
    rules = [*all_rules(), *(rule for file in files for rule in rules_of_file(file))]
    opened = replay.open(trace, attempt)
    chosen, given = choose(rules, only, skip), _thresholds(thresholds)
    with progress("rules") as tell:
        report = examine(opened, rules=chosen, thresholds=given, since=since, progress=tell)
    if as_json:
        print_json(dataclasses.asdict(report))
    else:
        _print(report, several_ranks=len(opened.ranks) > 1, verbose=verbose)
    failing = () if fail_on == "never" else SEVERITIES[: SEVERITIES.index(fail_on) + 1]
    sys.exit(any(finding.severity in failing for finding in report.findings))


def _thresholds(pairs: Iterable[str]) -> dict[str, float]:
    found = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        try:
            found[name.strip()] = float(value)
        except ValueError:
            equals = ""
        if not equals:
            raise click.BadParameter(f"{pair!r} is not like dead-relu=0.95.", param_hint="--threshold")
    return found


def _print(report: Report, *, several_ranks: bool, verbose: bool) -> None:
    width = max(60, min(shutil.get_terminal_size().columns if sys.stdout.isatty() else 120, 120))
    for ranks, finding in _joined(report.findings):
        steps = f"step {finding.first_step}"
        if finding.last_step != finding.first_step:
            steps = f"steps {finding.first_step} to {finding.last_step}"
        where = f", rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}" if several_ranks else ""
        say(f"{finding.severity:8}", nl=False, bold=True, fg="red" if finding.severity == "error" else "yellow")
        say(printable(f"{finding.rule}, {steps}{where}"))
        for text in (finding.message, finding.advice):
            say(textwrap.fill(printable(text), width, initial_indent=" " * 8, subsequent_indent=" " * 8))
        say()
    counts = {severity: sum(f.severity == severity for f in report.findings) for severity in SEVERITIES}
    found = ", ".join(f"{number} {name}{'s' if number > 1 else ''}" for name, number in counts.items() if number)
    rest = f"{len(report.quiet)} rules found nothing, {len(report.not_applicable)} do not apply"
    hint = "" if verbose or not report.not_applicable else " (-v says why)"
    say(f"{found or 'nothing found'}; {rest}{hint}.")
    if verbose:
        say(f"found nothing: {', '.join(report.quiet) or 'none'}")
        for name, reason in report.not_applicable.items():
            say(printable(f"does not apply: {name}: {reason}"))


def _joined(findings: Iterable[Finding]) -> list[tuple[list[int], Finding]]:
    """Return findings with the ranks that share them: most troubles are the same on all ranks of a training."""
    found: dict[tuple[object, ...], tuple[list[int], Finding]] = {}
    for finding in findings:
        key = (finding.rule, finding.layer, finding.kind, finding.first_step)
        ranks, _ = found.setdefault(key, ([], finding))
        if finding.rank not in ranks:
            ranks.append(finding.rank)
    return list(found.values())
