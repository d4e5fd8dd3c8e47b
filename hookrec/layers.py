"""Which modules of a model are recorded, and under which names.

A layer is a module by its qualified name. Wrappers (DistributedDataParallel, torch.compile, FSDP, checkpointing) put
prefixes into names that the user never wrote; they are taken out, so that traces of a wrapped and of a bare model have
the same layers.

A leaf module has no children. Some modules are leaves in effect, since their children are never called as modules:
attention uses its `out_proj` as a bag of parameters, and a parametrized layer has its parametrizations as children.
"""

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.utils.parametrize
from torch import nn

from hookrec.choices import Choices
from hookrec.errors import AttachError
from hookrec.settings import settings_of

_WRAPPED = frozenset(("_orig_mod", "_forward_module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"))
_WRAPPER_PACKAGES = ("torch.", "lightning", "pytorch_lightning", "accelerate", "deepspeed")
_LEAVES_IN_EFFECT = (nn.MultiheadAttention,)


@dataclass(frozen=True)
class Layer:
    """One module object of a model."""

    name: str
    module: nn.Module
    root: int
    leaf: bool
    why_not: str | None = None
    aliases: list[str] = field(default_factory=list)

    def matches(self, globs: Iterable[str]) -> bool:
        """Whether one of its names is matched by one of some globs."""
        return any(fnmatch.fnmatchcase(name, glob) for glob in globs for name in (self.name, *self.aliases))


# Users give their modules attributes and methods of any name, `modules` and `parameters` too; the dictionaries behind
# those of PyTorch are what is called.


def children(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module by their names."""
    return {name: child for name, child in module._modules.items() if child is not None}


def own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of a module, not of those below it, by their names."""
    return {name: parameter for name, parameter in module._parameters.items() if parameter is not None}


def named_modules(module: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all below it by their qualified names; each under each of its names."""
    yield name, module
    for attribute, child in children(module).items():
        yield from named_modules(child, f"{name}.{attribute}" if name else attribute)


def parameter_ids(modules: Iterable[nn.Module]) -> set[int]:
    """Return the identities of all parameters of some modules and those below them."""
    below = {id(m): m for module in modules for _, m in named_modules(module)}
    return {id(p) for m in below.values() for p in own_parameters(m).values()}


def layers_of(models: Mapping[str, nn.Module]) -> list[Layer]:
    """Return the modules of all models, each once, in the order of `named_modules()`.

    Args:
        models: by name; the name is put before the names of the layers. The only model may have the name "".
    """
    found: dict[int, Layer] = {}
    taken: set[str] = set()
    for root, (prefix, model) in enumerate(models.items()):
        names = {"": prefix}
        modules: dict[str, nn.Module] = {}
        reasons: dict[str, str | None] = {}
        for qualified, module in named_modules(model):
            modules[qualified] = module
            reason = None
            if qualified:
                parent = qualified.rpartition(".")[0]
                while (
                    parent not in names
                ):  # a name with a dot in it: PyTorch forbids it, and the dictionary of modules takes it
                    parent = parent.rpartition(".")[0]
                attribute = qualified[len(parent) + 1 :] if parent else qualified
                above = names[parent]
                names[qualified] = (
                    above if _wraps(modules[parent], attribute) else f"{above}.{attribute}" if above else attribute
                )
                reason = reasons[parent] or _why_not_called(modules[parent], attribute, above)
            reasons[qualified] = reason
            name = names[qualified]
            if (known := found.get(id(module))) is not None:
                if name != known.name and name not in known.aliases:
                    known.aliases.append(name)
                continue
            if any(_wraps(module, attribute) for attribute in children(module)):
                # A wrapper has the name of what it wraps, and is no layer of its own.
                found[id(module)] = Layer(
                    name, module, root, leaf=False, why_not="a wrapper: what it wraps is recorded"
                )
                continue
            if name in taken:
                name = f"{prefix}.{qualified}" if prefix else qualified
            taken.add(name)
            found[id(module)] = Layer(name, module, root, leaf=reason is None and _is_leaf(module), why_not=reason)
    return list(found.values())


def choose(layers: list[Layer], globs: tuple[str, ...], *, containers: bool) -> list[Layer]:
    """Return the layers to record.

    Raises:
        AttachError: a glob matches nothing, or there is nothing to match.
    """
    candidates = [layer for layer in layers if layer.why_not is None and (containers or layer.leaf)]
    if not candidates:
        raise AttachError(
            "The model has no leaf module that could be recorded. "
            "Pass containers=True (--containers) to record the module itself, or check what was passed as the model."
        )
    chosen = set()
    for glob in globs:
        matched = [id(layer) for layer in candidates if layer.matches((glob,))]
        if not matched:
            raise AttachError(_no_match(glob, layers, candidates, containers=containers))
        chosen.update(matched)
    return [layer for layer in candidates if id(layer) in chosen]


def _no_match(glob: str, layers: list[Layer], candidates: list[Layer], *, containers: bool) -> str:
    if not containers and any(fnmatch.fnmatchcase(layer.name, glob) for layer in layers if layer.why_not is None):
        return (
            f"layers={glob!r} matches containers only, no leaf module. Pass containers=True (--containers) to record "
            "those."
        )
    for layer in layers:
        if layer.why_not is not None and fnmatch.fnmatchcase(layer.name, glob):
            return f"layers={glob!r} matches {layer.name!r}, which cannot be recorded: {layer.why_not}."
    names = [layer.name for layer in candidates]
    near = difflib.get_close_matches(glob, names, n=3, cutoff=0.4) or names[:3]
    what = "modules" if containers else "leaf modules"
    examples = ", ".join(map(repr, near))
    return f"layers={glob!r} matches none of the {len(names)} {what}; there are, for example, {examples}."


def describe(
    layers: list[Layer], recorded: list[Layer], why: Callable[[str], str | None] = lambda name: None
) -> dict[str, Any]:
    """Return the model as `model.json` has it.

    Args:
        layers: all modules.
        recorded: those that are hooked in some step.
        why: says of a layer that was chosen why it may have no records.
    """
    hooked = {id(layer) for layer in recorded}
    owners: dict[int, tuple[str, str]] = {}
    modules = []
    for layer in layers:
        module: dict[str, Any] = {
            "name": layer.name,
            "class": f"{type(layer.module).__module__}.{type(layer.module).__qualname__}",
            "leaf": layer.leaf,
            "recorded": id(layer) in hooked,
            "parameters": [_parameter(layer, name, p, owners) for name, p in own_parameters(layer.module).items()],
            "aliases": layer.aliases,
        }
        if layer.leaf and (settings := settings_of(layer.module)) is not None:
            module["settings"] = settings
        if id(layer) not in hooked and (layer.leaf or layer.why_not):
            module["why"] = layer.why_not or why(layer.name) or "not chosen by layers="
        elif id(layer) in hooked and (reason := why(layer.name)) is not None:
            module["why"] = reason
        modules.append(module)
    return {"modules": modules}


def _parameter(layer: Layer, name: str, parameter: nn.Parameter, owners: dict[int, tuple[str, str]]) -> dict[str, Any]:
    # The shape of a lazy parameter raises until the first forward.
    shape = None if nn.parameter.is_lazy(parameter) else list(parameter.shape)
    dtype = str(parameter.dtype).removeprefix("torch.")
    found = {"name": name, "shape": shape, "dtype": dtype, "requires_grad": parameter.requires_grad}
    owner = owners.setdefault(id(parameter), (layer.name, name))
    return found if owner == (layer.name, name) else {**found, "tied_to": list(owner)}


def _is_leaf(module: nn.Module) -> bool:
    return isinstance(module, _LEAVES_IN_EFFECT) or all(_why_not_called(module, name, "") for name in children(module))


def _why_not_called(parent: nn.Module, attribute: str, name: str) -> str | None:
    """Why a child is no layer: its parent never calls it as a module, or hooks do not run on it."""
    if isinstance(parent, torch.jit.ScriptModule):
        return f"inside {name or 'the root'!r}, which is TorchScript: hooks do not run there"
    if isinstance(parent, _LEAVES_IN_EFFECT):
        return f"its weights are used by {name or 'the root'!r} without calling it"
    if attribute == "parametrizations" and torch.nn.utils.parametrize.is_parametrized(parent):
        return f"computes parameters of {name or 'the root'!r}, no activations"
    return None


def _wraps(parent: nn.Module, attribute: str) -> bool:
    """Whether `parent` only wraps its child `attribute`, whose name it should not change."""
    if attribute != "module":
        return attribute in _WRAPPED
    # "module" is a word that users take too.
    return type(parent).__module__.startswith(_WRAPPER_PACKAGES) and len(children(parent)) == 1


def model_facts(layers: list[Layer], chosen: list[Layer], choices: Choices | None) -> dict[str, Any]:
    """Return the model as `model.json` has it, with what rules say of the layers that `layers=` chose."""
    if choices is None:
        return describe(layers, chosen)
    names = {layer.name for layer in chosen}
    recorded = [layer for layer in chosen if not choices.is_off(layer.name)]
    return describe(layers, recorded, lambda name: choices.why_silent(name) if name in names else None)
