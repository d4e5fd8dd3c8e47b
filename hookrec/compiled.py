"""How compiled models are recorded: sampled steps run eagerly, the others stay compiled.

Code that torch.compile has made does not call hooks that are put on later, and says nothing. With the stance
"force_eager" the original Python runs instead, nothing is compiled, and nothing is compiled again afterwards. The
stance lives in `torch._dynamo`, whose import takes a second and a hundred megabytes, which a training that does not
compile must not pay: so it is set at once where dynamo is loaded, and otherwise as soon as somebody
imports it.
"""

from typing import Any, ClassVar

import torch

from hookrec.watch_import import ImportWatch


class EagerSteps:
    """Makes compiled code run eagerly between `enter` and `leave`.

    The stance is one of the process, so whoever comes first sets it and whoever leaves last puts back what was there.
    """

    _wanting: ClassVar[set["EagerSteps"]] = set()
    _stance: ClassVar[Any] = None

    def __init__(self) -> None:
        self._watch = ImportWatch("torch._dynamo", self._apply)

    def enter(self) -> None:
        """Run eagerly from here on."""
        self._wanting.add(self)
        if EagerSteps._stance is None:
            self._watch.begin()

    def leave(self) -> None:
        """Run what is compiled again, once nobody else wants otherwise."""
        self._wanting.discard(self)
        self._watch.end()
        if not self._wanting and EagerSteps._stance is not None:
            stance, EagerSteps._stance = EagerSteps._stance, None
            stance.__exit__(None, None, None)

    def _apply(self) -> None:
        if self._wanting and EagerSteps._stance is None:
            # It takes effect when it is made; as a context manager it knows how to go back.
            EagerSteps._stance = torch.compiler.set_stance("force_eager")
