"""A LightningModule that calls a part of itself, with validation, a scheduler and accumulated gradients."""

import sys
import tempfile

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))

    def training_step(self, batch, index):
        loss = self.net(batch[0]).pow(2).mean()
        self.log("loss", loss)
        print(repr(loss.item()))
        return loss

    def validation_step(self, batch, index):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), 0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


lightning.seed_everything(0, verbose=False)
loader = DataLoader(TensorDataset(torch.randn(32, 4)), 4)
trainer = lightning.Trainer(
    max_epochs=2,
    accelerator="cpu",
    accumulate_grad_batches=2,
    default_root_dir=tempfile.mkdtemp(dir=sys.argv[1]),
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(monitor="val_loss")],
)
module = Module()
trainer.fit(module, loader, loader)
print(repr(trainer.callback_metrics["val_loss"].item()), trainer.global_step)
