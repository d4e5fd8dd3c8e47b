"""`replay.check` says nothing of trainings that learn, at no time: models of many kinds, looked at live.

Each of these was reported by some rule while the rules were written, or is of a kind that rules find hard.
"""

import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import hookrec
import replay
from examples.sick.training import KINDS, one_thread

pytestmark = pytest.mark.slow

Training = tuple[nn.Module, Callable[[], Tensor], torch.optim.Optimizer]
"""A model, the loss on its next batch, and its optimizer."""


def digits(size: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Images of digits, epoch after epoch, with a smaller batch at the end of each."""
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16, torch.tensor(found.target)
    while True:
        for part in torch.randperm(len(x)).split(size):
            yield x[part], y[part]


def chains(words: int, length: int) -> Iterator[Tensor]:
    """Sentences in which a word mostly decides the next."""
    follows = torch.randperm(words)
    while True:
        sentence = [torch.randint(0, words, (16,))]
        for _ in range(length - 1):
            chance = torch.randint(0, words, (16,))
            sentence.append(torch.where(torch.rand(16) < 0.15, chance, follows[sentence[-1]]))
        yield torch.stack(sentence, 1)


def classify(model: nn.Module, optimizer: torch.optim.Optimizer, size: int = 32) -> Training:
    data = digits(size)

    def loss() -> Tensor:
        x, y = next(data)
        return functional.cross_entropy(model(x), y)

    return model, loss, optimizer


def convolutional(*between: Callable[[int], nn.Module]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in ((1, 16), (16, 32), (32, 32), (32, 64)):
        layers += [nn.Conv2d(before, after, 3, padding=1), *(make(after) for make in between)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def normalised() -> Training:
    model = convolutional(nn.BatchNorm2d, lambda _: nn.ReLU(inplace=True))
    return classify(model, torch.optim.Adam(model.parameters(), 1e-2))


def not_normalised() -> Training:
    model = convolutional(lambda _: nn.ReLU6())
    return classify(model, torch.optim.Adam(model.parameters(), 2e-3))


def hot() -> Training:
    hidden = [module for _ in range(2) for module in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(64, 10))
    return classify(model, torch.optim.SGD(model.parameters(), 0.2, momentum=0.9))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1, self.relu1 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        self.conv2, self.norm2, self.relu2 = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU()
        nn.init.zeros_(self.norm2.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu2(x + self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x))))))


def deep_residual() -> Training:
    blocks = [Residual() for _ in range(12)]
    ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), *blocks, *ends)
    return classify(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU()
        # Four ReLUs die together now and then, which is rightly reported.
        self.squeeze, self.act2, self.excite, self.gate = nn.Linear(16, 4), nn.SiLU(), nn.Linear(4, 16), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.conv(x)))
        return x * self.gate(self.excite(self.act2(self.squeeze(x.mean((2, 3))))))[:, :, None, None]


def gated() -> Training:
    ends = nn.Dropout(0.3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), Excited(), Excited(), *ends)
    return classify(model, torch.optim.Adam(model.parameters(), 3e-3))


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter that begins as zero."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64).requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapters() -> Training:
    model = nn.Sequential(nn.Flatten(), Adapted(), nn.ReLU(), Adapted(), nn.ReLU(), nn.Linear(64, 10))
    return classify(model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), 3e-3))


def far_targets() -> Training:
    model, teacher = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1)), torch.randn(8, 1)

    def loss() -> Tensor:
        x = torch.randn(32, 8)
        return functional.mse_loss(model(x), x @ teacher + 20)

    return model, loss, torch.optim.Adam(model.parameters(), 1e-2)


def language(name: str, **sizes: int) -> Callable[[], Training]:
    def make() -> Training:
        import transformers

        config = getattr(transformers, f"{name}Config")(vocab_size=61, bos_token_id=0, eos_token_id=0, **sizes)
        model, data = transformers.AutoModelForCausalLM.from_config(config), chains(61, 24)

        def loss() -> Tensor:
            tokens = next(data)
            return model(input_ids=tokens, labels=tokens).loss

        return model, loss, torch.optim.AdamW(model.parameters(), 1e-3)

    return make


def vision() -> Training:
    import transformers

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **sizes)
    model, data = transformers.ViTForImageClassification(config), digits(32)

    def loss() -> Tensor:
        x, y = next(data)
        return model(pixel_values=x, labels=y).loss

    return model, loss, torch.optim.AdamW(model.parameters(), 1e-3)


class Translator(nn.Module):
    """torch's own transformer, whose layers begin as copies of one, with a mask of -inf."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(61, 32), nn.Linear(32, 61)
        self.body = nn.Transformer(32, 4, 2, 2, 64, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.head(self.body(self.tokens(source), self.tokens(target), tgt_mask=mask))


def translation() -> Training:
    model, data = Translator(), chains(61, 12)

    def loss() -> Tensor:
        x = next(data)
        return functional.cross_entropy(model(x, x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())

    return model, loss, torch.optim.Adam(model.parameters(), 1e-3)


def recurrent() -> Training:
    embed, lstm, head = nn.Embedding(61, 32), nn.LSTM(32, 32, 2, batch_first=True), nn.Linear(32, 61)
    model, data = nn.ModuleList([embed, lstm, head]), chains(61, 20)

    def loss() -> Tensor:
        x = next(data)
        return functional.cross_entropy(head(lstm(embed(x[:, :-1]))[0]).flatten(0, 1), x[:, 1:].flatten())

    return model, loss, torch.optim.Adam(model.parameters(), 5e-3)


_OPT = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_dim": 64,
    "word_embed_proj_dim": 32,
    "max_position_embeddings": 64,
}
_SMALL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
TRAININGS = {
    **{make.__name__: make for make in (normalised, not_normalised, hot, deep_residual, gated, adapters, far_targets)},
    **{make.__name__: make for make in (vision, translation, recurrent)},
    "gpt2": language("GPT2", n_embd=32, n_layer=4, n_head=4, n_positions=64),
    "llama": language("Llama", **_SMALL),
    "gemma": language("Gemma", **_SMALL, num_key_value_heads=2, head_dim=8),
    "opt": language("OPT", **_OPT),
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("name", TRAININGS)
def test_nothing_is_found_at_any_time(name, scaled, tmp_path):
    torch.manual_seed(0)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of other packages
        model, loss_of, optimizer = TRAININGS[name]()
        found = train_and_look(model, loss_of, optimizer, tmp_path / "trace", scaled=scaled)

    assert found == []


def train_and_look(model, loss_of, optimizer, path, *, scaled):
    """Train for 160 steps; return what was found every ten steps, live, and in the end."""
    scaler = torch.amp.GradScaler("cpu", 2.0**20, growth_interval=50, enabled=scaled)
    found = []
    with hookrec.attach(model, path, kinds=KINDS, tensors=False, keep_free=0) as rec:
        for step in range(160):
            optimizer.zero_grad()
            loss = loss_of()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            rec.log(loss=loss)
            if step % 10 == 9 and (path / "rank-00000" / "model.json").exists():
                found += replay.check(replay.open(path), since=max(0, step - 15))
    return [*found, *replay.check(replay.open(path))]
