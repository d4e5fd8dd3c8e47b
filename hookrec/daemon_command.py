"""`hookrec daemon`: its options, its signals, and how its parts are put together."""

import contextlib
import functools
import os
import signal
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

import replay
from hookrec import delivery
from hookrec.actions import action
from hookrec.daemon import Daemon, only_one, watch
from hookrec.errors import DaemonError, HookrecError
from hookrec.events import Events
from hookrec.findings import Conditions, Finding
from hookrec.journal import Journal
from hookrec.judging import Pace
from hookrec.metrics import served
from hookrec.plan import parse_bytes
from hookrec.quota import Quota
from hookrec.watched import Duties
from replay.check import all_rules
from replay.command_line import Unanswered
from replay.rulebook import Rule, near


@click.command()
@click.argument("root", type=click.Path(path_type=Path))
@click.option("--when", multiple=True, help="SQL condition over records, such as 'n_nan > 0'; may be repeated.")
@click.option("--rules/--no-rules", default=True, show_default=True, help="Run the rules of `replay check`.")
@click.option("--webhook", help="Address that gets each alert as JSON, by POST.")
@click.option("--run", "command", help="Command that gets each alert as JSON, on its standard input; no shell.")
@click.option(
    "--then",
    "actions",
    nargs=2,
    multiple=True,
    metavar="RULE ACTION",
    help="What the first alert of a rule does to its training: trigger, 'set NAME=VALUE …', detach, or stop.",
)
@click.option("--quota", help="Bytes that the traces may take, such as 500GB; the oldest tensors go first.")
@click.option("--poll", default=1.0, show_default=True, type=click.FloatRange(0.05), help="Seconds between two looks.")
@click.option(
    "--seal-after",
    default=60.0,
    show_default=True,
    type=click.FloatRange(0),
    help="Seconds without a writer after which a trace is sealed.",
)
@click.option("--metrics", help="Address of metrics for Prometheus, such as 127.0.0.1:9464.")
@click.option("--json", "as_json", is_flag=True, help="Write what happens as lines of JSON.")
def daemon(root: Path, **options: Any) -> None:
    """Watch the traces below ROOT: alert, seal what died, keep a quota. Runs until SIGTERM or Ctrl-C.

    Alerts go to standard error, to alerts.jsonl in the trace, and on request to a webhook and a command. Ends with 0
    when it is stopped, and with 2 where it cannot begin: a wrong option, a ROOT that cannot be written, or one that is
    watched already.
    """
    try:
        _daemon(Path(os.path.abspath(root)), **options)
    except HookrecError as error:
        raise Unanswered(str(error)) from None


def _daemon(
    root: Path,
    *,
    when: tuple[str, ...],
    rules: bool,
    webhook: str | None,
    command: str | None,
    actions: tuple[tuple[str, str], ...],
    quota: str | None,
    poll: float,
    seal_after: float,
    metrics: str | None,
    as_json: bool,
) -> None:
    journal = Journal(as_json=as_json)
    conditions = Conditions(when)
    check = by_the_rules if rules else None
    ways: dict[str, tuple[delivery.Send, dict[str, Any]]] = {}
    if webhook is not None:
        ways["webhook"] = delivery.webhook(webhook), {}
    if command is not None:
        ways["command"] = delivery.command(command), {}
    for rule, line in actions:
        _check_rule(rule, when, rules=rules)
        # Hundreds of layers may follow the first one, and a training is stopped once.
        ways[f"{rule}: {line}"] = action(line, journal), {"rule": rule, "at_most": 1}
    limit = None if quota is None else Quota(parse_bytes(quota), journal)
    stop: list[int] = []
    with contextlib.ExitStack() as stack:
        stack.enter_context(only_one(root))
        outboxes = [delivery.Outbox(name, send, journal, **more) for name, (send, more) in ways.items()]
        for outbox in outboxes:
            stack.callback(outbox.close)
        events = Events(journal)
        stack.callback(events.close)
        pools = {name: ThreadPoolExecutor(1, name) for name in ("rules", "backlog", "chores")}
        for pool in pools.values():
            stack.callback(pool.shutdown, cancel_futures=True)
        duties = Duties(
            conditions=conditions,
            check=check,
            outboxes=outboxes,
            seal_after_s=seal_after,
            journal=journal,
            **pools,
            wake=events.wake,
            pace=Pace(),
        )

        def on_signal(number: int, frame: object) -> None:
            stop.append(number)
            events.wake()

        for number in (signal.SIGTERM, signal.SIGINT):
            stack.callback(signal.signal, number, signal.signal(number, on_signal))
        names = [*when, "replay.check" if check is not None else ""]
        watching = Daemon(root, duties, names, limit)
        if metrics is not None:
            address = stack.enter_context(served(metrics, root, watching.traces, watching.pulse))
            journal.say("metrics", f"metrics are at {address}", address=address)
        journal.say("begin", f"watching {root}", root=str(root))
        watch(watching, events, poll, lambda: bool(stop))
        journal.say("end", f"stopped by {signal.Signals(stop[0]).name}")


def _check_rule(rule: str, when: tuple[str, ...], *, rules: bool) -> None:
    """Refuse a rule by which nobody finds anything."""
    known = [*when, "ended", *([one.name for one in _rules()] if rules else ())]
    if rule not in known:
        raise DaemonError(
            f"--then {rule!r} …: there is no such rule, and no such condition of --when. {near(rule, known)}"
        )


def by_the_rules(trace: replay.Trace, since: int | None) -> Sequence[Finding]:
    """Return what the rules of `replay check` find."""
    return replay.check(trace, rules=_rules(), since=since)


@functools.cache
def _rules() -> list[Rule]:
    """The rules, looked for once: to ask the installed packages takes as long as to run the rules."""
    return all_rules()
