"""transformers' Trainer on a tiny random GPT-2, through accelerate, which uses the group that exists already."""

from __future__ import annotations

import tempfile

import common
import torch

common.start()

from transformers import (  # noqa: E402  (accelerate looks at torch's DDP class when imported)
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(0)
network = GPT2LMHeadModel(
    GPT2Config(
        vocab_size=32,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
)
tokens = torch.randint(0, 32, (64, 16), generator=torch.Generator().manual_seed(1))
data = [{"input_ids": row, "labels": row} for row in tokens]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder,
        use_cpu=True,
        max_steps=6,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
    )
    trainer = Trainer(model=network, args=arguments, train_dataset=data)
    trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
common.report(losses, network.state_dict(), wrapped=trainer.model_wrapped)
