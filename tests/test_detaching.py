"""A recorder may be detached at any moment, by any thread, and leaves nothing behind but the trace."""

import sys
import threading
import time

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

import hookrec
import replay
from hookrec.plan import KINDS

pytestmark = pytest.mark.usefixtures("one_thread")


def hooks_on(*models: nn.Module) -> int:
    """How many hooks are on modules and parameters."""
    modules = [module for model in models for module in model.modules()]
    parameters = [parameter for model in models for parameter in model.parameters()]
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in modules) + sum(
        len(p._backward_hooks or ()) + len(p._post_accumulate_grad_hooks or ()) for p in parameters
    )


@pytest.mark.parametrize("kinds", ["input", KINDS])
@pytest.mark.parametrize("moment", ["pre-hook", "hook", "tensor hook", "optimizer pre-hook", "optimizer hook"])
def test_a_hook_of_the_user_may_detach(tmp_path, kinds, moment):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    recorders = []

    def detach(*_: object) -> None:
        recorders[0].detach()

    handles = {
        "pre-hook": lambda: model[0].register_forward_pre_hook(detach),
        "hook": lambda: model[0].register_forward_hook(detach),
        "optimizer pre-hook": lambda: optimizer.register_step_pre_hook(detach),
        "optimizer hook": lambda: optimizer.register_step_post_hook(detach),
    }
    handle = handles[moment]() if moment in handles else None
    recorders.append(hookrec.attach(model, tmp_path / "a", kinds=kinds, tensors=False, keep_free=0))
    for _ in range(2):
        loss = model(torch.ones(1, 3)).sum()
        if moment == "tensor hook":
            loss.register_hook(detach)
        loss.backward()
        optimizer.step()
    if handle is not None:
        handle.remove()

    assert hooks_on(model) == 0
    assert replay.open(tmp_path / "a").endings[0]["how"] == "detached"


def test_detach_while_other_threads_train_neither_breaks_them_nor_leaves_a_hook(tmp_path):
    """With a short switch interval a thread is nearly always in the middle of optimizer.step."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    errors: list[BaseException] = []

    def train(model: nn.Module, stop: threading.Event) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 1e-6)
        try:
            while not stop.is_set():
                optimizer.zero_grad()
                model(torch.ones(4, 8)).sum().backward()
                optimizer.step()
        except BaseException as error:
            errors.append(error)

    try:
        for number in range(6):
            models = {name: nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))) for name in "ab"}
            stop = threading.Event()
            recorder = hookrec.attach(
                models, tmp_path / str(number), kinds=KINDS, ring="1MiB", tensors=False, keep_free=0
            )
            threads = [threading.Thread(target=train, args=(model, stop)) for model in models.values()]
            for thread in threads:
                thread.start()
            time.sleep(0.05)
            recorder.detach()
            time.sleep(0.01)
            stop.set()
            for thread in threads:
                thread.join()
            assert errors == []
            assert hooks_on(*models.values()) == 0
    finally:
        sys.setswitchinterval(interval)

    # What could not be taken out in the middle of a step goes with the next recorder that is detached.
    hookrec.attach(nn.Linear(1, 1), tmp_path / "last", kinds=KINDS, keep_free=0).detach()
    assert not _global_optimizer_pre_hooks
    assert not _global_optimizer_post_hooks
