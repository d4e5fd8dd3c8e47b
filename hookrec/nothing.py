"""Why a step has no record: the likely cause, in words that say what to look at."""

from collections.abc import Collection, Iterable

_OF_BACKWARD = {"grad_output", "grad_input", "param_grad_acc"}
_OF_OPTIMIZER = {"param_grad", "update"}


def likely_cause(*, called: bool, kinds: Collection[str], notes: Iterable[tuple[str, str]]) -> str:
    """Return the likely cause, as a sentence.

    Args:
        called: whether the forward of a model was called in the step.
        kinds: what is recorded.
        notes: layers, and why something of them could not be recorded.
    """
    wanted = set(kinds)
    if wanted <= _OF_OPTIMIZER:
        return "no optimizer that holds its parameters has changed them. Was it made before they were replaced?"
    if not called:
        return (
            "the model was not called. Is another object trained, such as a copy of it, "
            "or is forward() called directly, past the hooks?"
        )
    for layer, note in notes:
        return f"what was called cannot be recorded; {layer or 'the root'}: {note}."
    if wanted <= _OF_BACKWARD | _OF_OPTIMIZER:
        return f"no backward pass has reached its layers, and kinds has nothing else ({', '.join(kinds)})."
    return (
        "none of the chosen layers was called. Does the model call forward() directly, past the hooks, "
        "or run as TorchScript or by a fused path?"
    )
