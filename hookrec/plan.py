"""What to record: one frozen value, checked once, printed into the trace."""

import dataclasses
import difflib
import fnmatch
import inspect
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from hookrec.errors import AttachError
from hookrec.schedule import ALL_STEPS, schedule_of

KINDS = ("output", "grad_output", "input", "grad_input", "param", "param_grad", "param_grad_acc", "update")
DEFAULT_KINDS = ("output", "grad_output")
STORES = ("zarr", "hdf5")
COMPRESSIONS = (None, "zstd", "lz4", "blosc")
WHEN_FULL = ("block", "skip")
DURABILITIES = ("process", "power")
DEFAULT_TRIGGERS = ("n_nan > 0",)
CLOCKS = ("optimizer", "forward", "manual")

LEAST_RING_BYTES = 10**6

CHANGEABLE = (
    *("layers", "containers", "kinds", "every", "steps", "tensors", "tensor_steps", "exponents"),
    *("when_full", "rules"),
)
"""What may be changed while a recording is under way; the rest is settled when the writer begins."""

TENSOR_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
"""In which tensors may be stored, and their bytes."""

_WIDER = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_OF_BATCH = ("output", "grad_output", "input", "grad_input")
_OF_TENSORS = ("tensor_steps", "tensor_dtype", "tensor_rows")
_OF_FLIGHT = ("after", "triggers", "trigger_rest", "trigger_limit", "signals")

_OF_RULES = ("record", "tensors", "every", "steps", "tensor_steps", "tensor_dtype", "tensor_rows", "exponents")
_NONE = "none"  # TOML has no word of its own for it

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


@dataclass(frozen=True)
class Rule:
    """What is recorded otherwise of some layers and kinds.

    Attributes:
        layers: globs over qualified layer names.
        kinds: of which kinds; all of the plan if empty.
        record: whether there are records at all.
        options: names and values of what the plan says otherwise; the rest is as the plan has it.
    """

    layers: tuple[str, ...] = ("*",)
    kinds: tuple[str, ...] = ()
    record: bool = True
    options: tuple[tuple[str, Any], ...] = ()

    def matches(self, names: Iterable[str], kind: str) -> bool:
        """Whether it is about a kind of a layer that has these names."""
        return (not self.kinds or kind in self.kinds) and any(
            fnmatch.fnmatchcase(name, glob) for glob in self.layers for name in names
        )

    def as_json(self) -> dict[str, Any]:
        """Return the rule as it is written in a plan."""
        kinds = {"kinds": list(self.kinds)} if self.kinds else {}
        record = {} if self.record else {"record": False}
        return {"layers": list(self.layers), **kinds, **record, **dict(self.options)}


@dataclass(frozen=True)
class Plan:
    """What to record, and within which limits.

    Attributes:
        layers: globs over qualified layer names.
        containers: whether the globs choose among all modules, not leaf modules alone.
        kinds: what to record of each layer.
        ops: globs over functions of torch, whose results inside of modules are recorded.
        every: record steps 0, `every`, 2 × `every`, ….
        steps: record these alone: ranges as in Python's slices, with an `x3` for three steps in a row each time.
        tensors: whether tensors are kept, or their statistics alone.
        tensor_steps: of the recorded steps those whose tensors are kept, written likewise.
        tensor_dtype: store tensors of wider floating dtypes in this one; statistics are of what was there.
        tensor_rows: store that many rows of each activation and gradient, the first samples of the batch.
        exponents: whether the elements of each floating tensor are counted by their binary exponents, by which what
            bf16, fp16 and fp8 would lose is told; also where the tensor is not kept.
        store: layout on the disk.
        compression: how the writer compresses the tensors, if it does.
        ring_bytes: shared memory between the training and the writer, a megabyte at least.
        when_full: wait for the writer when the ring is full ("block"), or drop the tensors of the step ("skip").
        clock: what ends a step.
        max_bytes: bytes of tensors past which only statistics are recorded; the step that passes them is kept whole.
        keep_free: share of the file system that is left free, likewise.
        durability: whether a commit outlives the processes, or a loss of power as well.
        restart: how many times another writer process is started when it dies.
        flight: how many steps before that of a trigger are kept, in flight mode; without it that is off.
        after: how many steps after a trigger are kept, in flight mode.
        triggers: conditions on statistics and logged numbers at which steps are kept, in flight mode.
        trigger_rest: steps after which the same condition may fire again.
        trigger_limit: how often the same condition may fire.
        signals: names of signals that are triggers.
        rules: what is recorded otherwise of some layers and kinds; of several that match, the last decides.
        transform: functions, as `module:name`, whose results are recorded as well, by globs over layer names.
    """

    layers: tuple[str, ...] = ("*",)
    containers: bool = False
    kinds: tuple[str, ...] = DEFAULT_KINDS
    ops: tuple[str, ...] = ()
    every: int = 1
    steps: str = ALL_STEPS
    tensors: bool = True
    tensor_steps: str = ALL_STEPS
    tensor_dtype: str | None = None
    tensor_rows: int | None = None
    exponents: bool = False
    store: str = "zarr"
    compression: str | None = None
    ring_bytes: int = 512 * 10**6
    when_full: str = "block"
    clock: str = "optimizer"
    max_bytes: int = 50 * 10**9
    keep_free: float = 0.1
    durability: str = "process"
    restart: int = 1
    flight: int | None = None
    after: int = 5
    triggers: tuple[str, ...] = ()
    trigger_rest: int = 100
    trigger_limit: int = 10
    signals: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    transform: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        if not self.layers:
            raise AttachError("layers is empty; '*' takes all.")
        if not self.kinds:
            raise AttachError(f"kinds is empty; there are {', '.join(KINDS)}.")
        for kind in self.kinds:
            _one_of("kind", kind, KINDS)
        if self.ops and not {"output", "grad_output"} & set(self.kinds):
            raise AttachError("ops are recorded as output and grad_output, and kinds has neither.")
        _one_of("store", self.store, STORES)
        _one_of("compression", self.compression, COMPRESSIONS)
        _one_of("when_full", self.when_full, WHEN_FULL)
        _one_of("durability", self.durability, DURABILITIES)
        if self.clock != "given":  # which stands for an optimizer that was passed
            _one_of("clock", self.clock, CLOCKS)
        _whole("every", self.every, 1, "steps")
        schedule_of("steps", self.steps)
        schedule_of("tensor_steps", self.tensor_steps)
        _one_of("tensor_dtype", self.tensor_dtype, (None, *TENSOR_DTYPES))
        if self.tensor_rows is not None:
            _whole("tensor_rows", self.tensor_rows, 1, "rows")
        given = [name for name in _OF_TENSORS if getattr(self, name) != getattr(Plan, name)]
        if given and not self.tensors:
            raise AttachError(f"{given[0]} says what is kept of tensors, and tensors=False that none are.")
        _whole("restart", self.restart, 0, "times")
        if self.ring_bytes < LEAST_RING_BYTES:
            raise AttachError(
                f"A ring of {self.ring_bytes:,} bytes is too small; it takes {LEAST_RING_BYTES:,} at least, and should "
                "hold the tensors of a step or two, such as ring='512MB'."
            )
        self._check_flight()
        for number, rule in enumerate(self.rules):
            self._check_rule(number, rule)
        if (
            isinstance(self.keep_free, bool)
            or not isinstance(self.keep_free, (int, float))
            or not 0 <= self.keep_free < 1
        ):
            raise AttachError(f"keep_free is {self.keep_free!r}; it is a share of the file system, from 0 up to 1.")

    def _check_flight(self) -> None:
        if self.flight is None:
            given = [name for name in _OF_FLIGHT if getattr(self, name) != getattr(Plan, name)]
            if given:
                verb = "is" if len(given) == 1 else "are"
                raise AttachError(
                    f"{' and '.join(given)} {verb} of flight mode; pass flight=5 to keep five steps, or more, or leave "
                    "it out."
                )
            return
        if not self.tensors:
            raise AttachError("flight mode keeps tensors; leave out tensors=False, or flight.")
        if self.tensor_steps != ALL_STEPS:
            raise AttachError(
                "flight mode chooses the steps whose tensors are kept; leave out tensor_steps, or flight."
            )
        _whole("flight", self.flight, 1, "steps")
        _whole("after", self.after, 0, "steps")
        _whole("trigger_rest", self.trigger_rest, 0, "steps")
        _whole("trigger_limit", self.trigger_limit, 1, "times")
        from hookrec.conditions import Condition

        for trigger in self.triggers:
            Condition(trigger)

    def _check_rule(self, number: int, rule: Rule) -> None:
        absent = [kind for kind in rule.kinds if kind not in self.kinds]
        if absent:
            raise AttachError(f"rules[{number}] is about {', '.join(absent)}, and kinds has no such; add it there.")
        if self.flight is not None and "tensor_steps" in dict(rule.options):
            raise AttachError(
                f"rules[{number}] has tensor_steps, and flight mode chooses the steps whose tensors are kept."
            )
        try:
            self.by(rule)
        except AttachError as error:
            raise AttachError(f"rules[{number}]: {error}") from None

    def by(self, rule: Rule) -> Self:
        """Return the plan for what a rule is about, without rules and flight mode."""
        options = dict(rule.options)
        alone = {name: getattr(Plan, name) for name in ("flight", *_OF_FLIGHT, "rules")}
        if options.get("tensors") is False:  # then what the plan says of tensors is for others
            alone |= {name: getattr(Plan, name) for name in _OF_TENSORS}
        return dataclasses.replace(self, **{**alone, **options})

    def samples(self, step: int) -> bool:
        """Whether the step is recorded."""
        return step % self.every == 0 and step in schedule_of("steps", self.steps)

    def keeps_tensors(self, step: int) -> bool:
        """Whether the tensors of a recorded step are kept."""
        return self.tensors and step in schedule_of("tensor_steps", self.tensor_steps)

    def stored(self, kind: str, dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
        """Return dtype and shape of what is stored of a tensor."""
        if self.tensor_dtype is not None and _WIDER.get(dtype, 0) > TENSOR_DTYPES[self.tensor_dtype]:
            dtype = self.tensor_dtype
        if self.tensor_rows is not None and shape and kind in _OF_BATCH:
            shape = (min(shape[0], self.tensor_rows), *shape[1:])
        return dtype, shape

    def as_json(self) -> dict[str, Any]:
        """Return the plan as `trace.json` has it."""
        rules = [rule.as_json() for rule in self.rules]
        return {**dataclasses.asdict(self), "rules": rules, "transform": dict(self.transform)}

    def unlike(self, other: Self) -> str:
        """Return what it says otherwise than another, in words; an empty string if that is nothing."""
        then, now = other.as_json(), self.as_json()
        different = [name for name in now if now[name] != then[name]]
        return ", ".join(f"{name} {_words(then[name])} -> {_words(now[name])}" for name in different)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the plan with other values, given as `plan_of` takes them.

        Raises:
            AttachError: there is no such value, or it cannot be changed.
        """
        for name in changes:
            if name not in CHANGEABLE:
                known = name in {field.name for field in dataclasses.fields(self)} or name in PLAN_OPTIONS
                what = f"{name} cannot be changed while recording" if known else f"There is no {name!r} in a plan"
                raise AttachError(f"{what}; {', '.join(CHANGEABLE)} can.")
        checked = plan_of(**changes)
        return dataclasses.replace(self, **{name: getattr(checked, name) for name in changes})


def plan_of(
    *,
    layers: str | Iterable[str] = "*",
    containers: bool = False,
    kinds: str | Iterable[str] = DEFAULT_KINDS,
    ops: str | Iterable[str] = (),
    every: int = 1,
    steps: str = ALL_STEPS,
    tensors: bool = True,
    tensor_steps: str = ALL_STEPS,
    tensor_dtype: str | None = None,
    tensor_rows: int | None = None,
    exponents: bool = False,
    store: str = "zarr",
    compression: str | None = None,
    ring: str | int = "512MB",
    when_full: str = "block",
    clock: str = "optimizer",
    max_bytes: str | int = "50GB",
    keep_free: float = 0.1,
    durability: str = "process",
    restart: int = 1,
    flight: int | None = None,
    after: int = 5,
    triggers: str | Iterable[str] | None = None,
    trigger_rest: int = 100,
    trigger_limit: int = 10,
    signals: str | Iterable[str] = (),
    rules: Iterable[Mapping[str, Any]] = (),
    transform: Mapping[str, Callable[..., Any] | str] | None = None,
) -> Plan:
    """Return the plan that is meant by the arguments of `attach`, which are described there.

    Raises:
        AttachError: one of them will not do.
    """
    default_triggers = DEFAULT_TRIGGERS if flight is not None else ()
    return Plan(
        layers=as_tuple("layers", layers),
        containers=_boolean("containers", containers),
        kinds=as_tuple("kinds", kinds),
        ops=as_tuple("ops", ops),
        every=every,
        steps=steps,
        tensors=_boolean("tensors", tensors),
        tensor_steps=tensor_steps,
        tensor_dtype=tensor_dtype,
        tensor_rows=tensor_rows,
        exponents=_boolean("exponents", exponents),
        store=store,
        compression=compression,
        ring_bytes=parse_bytes(ring),
        when_full=when_full,
        clock=clock,
        max_bytes=parse_bytes(max_bytes),
        keep_free=keep_free,
        durability=durability,
        restart=restart,
        flight=flight,
        after=after,
        triggers=as_tuple("triggers", default_triggers if triggers is None else triggers),
        trigger_rest=trigger_rest,
        trigger_limit=trigger_limit,
        signals=as_tuple("signals", signals),
        rules=_as_rules(rules),
        transform=_as_names(transform),
    )


PLAN_OPTIONS = tuple(inspect.signature(plan_of).parameters)
"""What a file with a plan may say, and `attach` takes."""


def read_plan(path: Path) -> dict[str, Any]:
    """Return the arguments of `attach` that a TOML file has, at its top.

    Raises:
        AttachError: it cannot be read, or has what is no argument.
    """
    try:
        with path.open("rb") as file:
            options = tomllib.load(file)
    except OSError as error:
        raise AttachError(f"The plan {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AttachError(f"The plan {path} is no TOML: {error}.") from None
    for name in options:
        if name not in PLAN_OPTIONS:
            near = difflib.get_close_matches(name, PLAN_OPTIONS, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(PLAN_OPTIONS)}."
            raise AttachError(f"The plan {path} has {name!r}, which is no option; {hint}")
    return options


def parse_bytes(size: str | int) -> int:
    """Return a size such as "512MB", "1.5 GiB" or 1000000 in bytes.

    Raises:
        AttachError: it is no size.
    """
    if isinstance(size, int) and not isinstance(size, bool):
        number, unit = float(size), ""
    else:
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
        if match is None:
            raise AttachError(f"{size!r} is no size; write bytes as a number, or like '512MB' or '1GiB'.")
        number, unit = float(match[1]), match[2]
        unit = unit if not unit or unit.endswith("B") else unit + "B"
    if unit not in _UNITS or number <= 0:
        raise AttachError(f"{size!r} is no size; write bytes as a number, or like '512MB' or '1GiB'.")
    return int(number * _UNITS[unit])


def as_tuple(what: str, names: str | Iterable[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple, without repetition.

    Raises:
        AttachError: they are no strings.
    """
    if isinstance(names, str):
        return (names,)
    try:
        several = tuple(dict.fromkeys(names))
    except TypeError:
        several = (None,)  # type: ignore[assignment]
    if not all(isinstance(name, str) for name in several):
        raise AttachError(f"{what} is {names!r}; it takes a string or several.")
    return several


def _as_rules(rules: object) -> tuple[Rule, ...]:
    if isinstance(rules, Mapping):
        rules = (rules,)
    if not isinstance(rules, (list, tuple)) or not all(isinstance(rule, Mapping) for rule in rules):
        raise AttachError(
            f"rules is {rules!r}; it takes a list of rules, such as [{{'layers': 'encoder.*', 'tensors': False}}]."
        )
    return tuple(_as_rule(f"rules[{number}]", rule) for number, rule in enumerate(rules))


def _as_names(transform: object) -> tuple[tuple[str, str], ...]:
    """Return the functions by their names, which is how a trace has them."""
    if transform is None:
        return ()
    if not isinstance(transform, Mapping) or not all(isinstance(glob, str) for glob in transform):
        raise AttachError(f"transform is {transform!r}; it takes functions by globs over layers: {{'encoder.*': fn}}.")
    named = []
    for glob, function in transform.items():
        place = isinstance(function, str) and re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", function)
        if not place and (isinstance(function, str) or not callable(function)):
            raise AttachError(f"transform[{glob!r}] is {function!r}; it takes a function, or its place: 'module:name'.")
        named.append((glob, function if isinstance(function, str) else _place_of(function)))
    return tuple(named)


def _place_of(function: object) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or '?'}:{name}"


def _as_rule(what: str, rule: Mapping[str, Any]) -> Rule:
    known = ("layers", "kinds", *_OF_RULES)
    for name in rule:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it may have {', '.join(known)}."
            raise AttachError(f"{what} has {name!r}, which no rule has; {hint}")
    options = {name: value for name, value in rule.items() if name in _OF_RULES and name != "record"}
    for name in ("tensor_dtype", "tensor_rows"):
        if options.get(name) == _NONE:
            options[name] = None
    for name in ("tensors", "exponents"):
        if name in options:
            _boolean(f"{name} of {what}", options[name])
    record = _boolean(f"record of {what}", rule.get("record", True))
    if not options and record:
        raise AttachError(f"{what} says nothing; it may have {', '.join(_OF_RULES)}.")
    if options and not record:
        raise AttachError(f"{what} has record=False, and {', '.join(options)} of what is not recorded.")
    layers = as_tuple(f"layers of {what}", rule.get("layers", "*"))
    kinds = as_tuple(f"kinds of {what}", rule.get("kinds", ()))
    if not layers or ("kinds" in rule and not kinds):
        raise AttachError(f"{what} is about nothing: its {'kinds' if layers else 'layers'} is empty.")
    for kind in kinds:
        _one_of("kind", kind, KINDS)
    return Rule(layers, kinds, record, tuple(options.items()))


def _words(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


def _boolean(what: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise AttachError(f"{what} is {value!r}; it is true or false.")
    return value


def _one_of(what: str, value: object, choices: tuple[object, ...]) -> None:
    if value not in choices:
        raise AttachError(f"There is no {what} {value!r}; there are {', '.join(repr(choice) for choice in choices)}.")


def _whole(what: str, value: object, least: int, unit: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise AttachError(f"{what} is {value!r}; it takes a whole number of {unit} from {least}.")
