"""Hugging Face accelerate: prepare, accumulate, clip, gather. It uses the group that exists already."""

from __future__ import annotations

import common
import torch
from torch.utils.data import DataLoader, TensorDataset

common.start()

from accelerate import Accelerator  # noqa: E402  (it looks at torch's DDP class when imported)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
network = common.model()
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
loader = DataLoader(TensorDataset(*common.samples(200)), batch_size=10, shuffle=True)
network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
losses = []
for inputs, targets in loader:
    with accelerator.accumulate(network):
        loss = torch.nn.functional.cross_entropy(network(inputs), targets)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
common.report(losses, accelerator.unwrap_model(network).state_dict(), wrapped=network)
