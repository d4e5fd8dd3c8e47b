"""The Trainer of transformers, on a tiny GPT-2."""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=16, n_layer=2, n_head=2))
rows = [{"input_ids": (row := torch.randint(50, (16,))), "labels": row} for _ in range(16)]
arguments = TrainingArguments(
    sys.argv[1], per_device_train_batch_size=4, max_steps=3, save_strategy="no", report_to=[], use_cpu=True
)
trainer = Trainer(model, arguments, train_dataset=rows)
trainer.train()
print(repr(float(sum(p.detach().double().sum() for p in model.parameters()))))
