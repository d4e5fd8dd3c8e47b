"""How compiled models are recorded: sampled steps run eagerly, the others stay compiled.

Code that torch.compile has made does not call hooks that are put on later, and says nothing. With the stance
"force_eager" the original Python runs instead, nothing is compiled, and nothing is compiled again afterwards. The
stance lives in `torch._dynamo`, whose import takes a second and a hundred megabytes, which a training that does not
compile must not pay: so it is set at once where dynamo is loaded, and otherwise as soon as somebody
imports it.
"""

from typing import Any

import torch

from hookrec.watch_import import ImportWatch


class EagerSteps:
    """Makes compiled code run eagerly between `enter` and `leave`."""

    def __init__(self) -> None:
        self._wanted = False
        self._stance: Any = None
        self._watch = ImportWatch("torch._dynamo", self._apply)

    def enter(self) -> None:
        """Run eagerly from here on."""
        self._wanted = True
        if self._stance is None:
            self._watch.begin()

    def leave(self) -> None:
        """Run what is compiled again."""
        self._wanted = False
        self._watch.end()
        if self._stance is not None:
            stance, self._stance = self._stance, None
            stance.__exit__(None, None, None)

    def _apply(self) -> None:
        if self._wanted and self._stance is None:
            # It takes effect when it is made; as a context manager it knows how to go back.
            self._stance = torch.compiler.set_stance("force_eager")
