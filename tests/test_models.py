"""Whole models, trained for five steps: each record equals an independent clone, and the losses are the bare run's."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hookrec
import replay
from tests.oracle import Key, Oracle, differences, raw, recorded, tensors_in

STEPS = 5

Training = tuple[nn.Module, Callable[[], Tensor]]
"""A model, and its loss on fixed data."""


pytestmark = pytest.mark.usefixtures("deterministic")


def language(name: str, **sizes: Any) -> Callable[[], Training]:
    """A causal language model of the `transformers` package, from a small config, with random weights."""

    def make() -> Training:
        import transformers

        config = getattr(transformers, f"{name}Config")(**{"vocab_size": 61, **sizes})
        model = transformers.AutoModelForCausalLM.from_config(config)
        tokens = torch.randint(0, 61, (2, 9))
        return model, lambda: model(input_ids=tokens, labels=tokens).loss

    return make


_SMALL = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}


def bert() -> Training:
    import transformers

    model = transformers.BertForMaskedLM(transformers.BertConfig(vocab_size=61, **_SMALL))
    tokens = torch.randint(0, 61, (2, 9))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def t5() -> Training:
    import transformers

    config = transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2)
    config.decoder_start_token_id = 0
    model, tokens = transformers.T5ForConditionalGeneration(config), torch.randint(1, 61, (2, 9))
    return model, lambda: model(input_ids=tokens, labels=tokens).loss


def vit() -> Training:
    import transformers

    model = transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=4, **_SMALL))
    images, labels = torch.randn(2, 3, 16, 16), torch.tensor([0, 1])
    return model, lambda: model(pixel_values=images, labels=labels).loss


def whisper() -> Training:
    import transformers

    config = transformers.WhisperConfig(
        vocab_size=61,
        num_mel_bins=8,
        d_model=16,
        max_source_positions=20,
        max_target_positions=20,
        **{
            f"{part}_{what}": size for part in ("encoder", "decoder") for what, size in (("layers", 2), ("ffn_dim", 24))
        },
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    model = transformers.WhisperForConditionalGeneration(config)
    sound, tokens = torch.randn(2, 8, 40), torch.randint(3, 61, (2, 9))
    return model, lambda: model(input_features=sound, labels=tokens).loss


def transformer() -> Training:
    model = nn.Transformer(16, 2, 2, 2, 24, batch_first=True)
    source, target = torch.randn(2, 7, 16), torch.randn(2, 5, 16)
    return model, lambda: model(source, target).pow(2).mean()


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.gru = nn.LSTM(6, 8, 2, dropout=0.2), nn.GRU(8, 8, bidirectional=True)
        self.cell, self.head = nn.GRUCell(16, 8), nn.Linear(8, 3)

    def forward(self, x):
        y, (hidden, _) = self.lstm(x)
        packed = nn.utils.rnn.pack_padded_sequence(y, torch.tensor([5, 3]))
        z, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0])
        state = hidden[-1]
        for now in z:
            state = self.cell(now, state)
        return self.head(state)


def recurrent() -> Training:
    model, x = Recurrent(), torch.randn(5, 2, 6)
    return model, lambda: model(x).pow(2).mean()


class UNet(nn.Module):
    """As in diffusion: a time embedding that is added in each block, skips by concatenation, in-place activations."""

    def __init__(self, width: int = 8):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, width), nn.SiLU(), nn.Linear(width, width))
        self.enter, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 3, 2, 1)
        self.norm, self.act = nn.GroupNorm(2, width), nn.SiLU(inplace=True)
        self.up, self.leave = nn.ConvTranspose2d(width, width, 2, 2), nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x, t):
        time = self.time(t)[:, :, None, None]
        top = self.act(self.norm(self.enter(x) + time))
        low = self.act(self.norm(self.down(top) + time))
        return self.leave(torch.cat([self.up(low), top], 1))


def unet() -> Training:
    model, x, t = UNet(), torch.randn(2, 1, 8, 8), torch.rand(2, 1)
    return model, lambda: functional.mse_loss(model(x, t), torch.zeros_like(x))


class Bottleneck(nn.Module):
    """Depthwise, squeeze and excitation, stochastic depth: what convolutional nets are built of these days."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(width, width, 3, padding=1, groups=width), nn.BatchNorm2d(width)
        self.squeeze, self.gate = nn.AdaptiveAvgPool2d(1), nn.Sequential(nn.Conv2d(width, width, 1), nn.Hardsigmoid())
        self.act, self.project, self.drop = nn.Hardswish(inplace=True), nn.Conv2d(width, width, 1), nn.Dropout2d(0.2)

    def forward(self, x):
        y = self.act(self.norm(self.depthwise(x)))
        y = y * self.gate(self.squeeze(y))
        y = self.drop(self.project(y))
        y += x
        return y


def convolutional() -> Training:
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU6(inplace=True), nn.MaxPool2d(2), Bottleneck(8), Bottleneck(8)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
    )
    x, y = torch.randn(2, 3, 16, 16), torch.tensor([1, 2])
    return model, lambda: functional.cross_entropy(model(x), y)


MODELS: dict[str, Callable[[], Training]] = {
    "gpt2": language("GPT2", n_embd=16, n_layer=2, n_head=2, n_positions=16),
    "llama": language("Llama", num_key_value_heads=1, **_SMALL),
    "mixtral": language("Mixtral", num_key_value_heads=1, num_local_experts=4, **_SMALL),
    "mamba": language("Mamba", hidden_size=16, num_hidden_layers=2, state_size=4),
    **{make.__name__: make for make in (bert, t5, vit, whisper)},
    **{make.__name__: make for make in (transformer, recurrent, unet, convolutional)},
}
OURS = {"transformer", "recurrent", "unet", "convolutional"}


def train(name: str, attach: Callable[[nn.Module], Any], states: list[dict[str, Tensor]] | None = None) -> list[float]:
    """Train a model; with `states` of another run, from its parameters in each step."""
    torch.manual_seed(0)
    model, loss = MODELS[name]()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    losses = []
    with attach(model) as watching:
        for step in range(STEPS):
            if states is not None and len(states) == STEPS + 1:
                model.load_state_dict(states[step])
            elif states is not None:
                states.append(copy.deepcopy(model.state_dict()))
            optimizer.zero_grad()
            value = loss()
            value.backward()
            optimizer.step()
            losses.append(value.item())
            if isinstance(watching, Oracle):
                watching.step()
    if states is not None and len(states) == STEPS:
        states.append(copy.deepcopy(model.state_dict()))
    return losses


@pytest.mark.parametrize("name", MODELS)
def test_records_equal_clones_and_the_training_is_the_bare_one(tmp_path, name):
    """To rounding, since clones are contiguous, and kernels go through other tensors in another order."""
    if name not in OURS:
        pytest.importorskip("transformers")
    bare: list[dict[str, Tensor]] = []
    watched: list[dict[str, Tensor]] = []

    losses = train(name, contextlib.nullcontext, bare)
    assert train(name, lambda model: hookrec.attach(model, tmp_path / "a", keep_free=0), watched) == losses

    assert all(map(torch.equal, watched[-1].values(), bare[-1].values()))
    trace = replay.open(tmp_path / "a")
    assert trace.steps == list(range(STEPS))
    oracles = []

    def independently(model: nn.Module) -> Any:
        names = [module["name"] for module in trace.modules() if module["recorded"]]
        oracles.append(Oracle({name: model.get_submodule(name) for name in names}))
        return contextlib.nullcontext(oracles[0])

    train(name, independently, bare)
    got, want = recorded(trace), oracles[0].records
    assert len(want) > 20
    assert got.keys() == want.keys()
    for key, value in want.items():
        one, other = np.frombuffer(got[key], "f4"), np.frombuffer(value, "f4")
        assert np.abs(one - other).max() <= 1e-5 * np.abs(other).max(), key
        if key[2] == "output" and name in OURS:
            assert got[key] == value, key


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OURS])
def test_records_are_to_the_bit_what_a_plain_hook_clones(tmp_path, name):
    """These models change no output in place, so that plain hooks see the right gradients."""
    pytest.importorskip("transformers")
    clones: dict[Key, bytes] = {}
    calls: dict[tuple[int, str], int] = {}

    @contextlib.contextmanager
    def both(model: nn.Module) -> Iterator[None]:
        with hookrec.attach(model, tmp_path / "a", keep_free=0) as recorder:
            modules = [module["name"] for module in replay.open(tmp_path / "a").modules() if module["recorded"]]
            for layer in modules:
                model.get_submodule(layer).register_forward_hook(plain(recorder, layer))
            yield

    def plain(recorder: hookrec.Recorder, layer: str) -> Callable[..., None]:
        def after(module: nn.Module, args: Any, output: Any) -> None:
            step = recorder._recording.step_number
            call = calls[step, layer] = calls.get((step, layer), -1) + 1
            for path, tensor in tensors_in(output):
                keep((step, layer, "output", call, path), tensor)
                if tensor.requires_grad:
                    tensor.register_hook(functools.partial(keep, (step, layer, "grad_output", call, path)))

        return after

    def keep(key: Key, tensor: Tensor) -> None:
        clones[key] = raw(tensor)

    train(name, both)

    assert len(clones) > 20
    assert differences(recorded(replay.open(tmp_path / "a")), clones) == []
