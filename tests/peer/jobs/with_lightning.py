"""Lightning: a Trainer with its DDP strategy, which reduces what is logged over the ranks."""

from __future__ import annotations

from typing import Any

import common
import lightning
import torch
from lightning.pytorch.strategies import ddp
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(lightning.LightningModule):
    """The common model as Lightning wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.network = common.model()
        self.means: list[float] = []
        self.wrapped: list[Any] = []  # not a submodule

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:
        """The loss of one batch on this rank."""
        inputs, targets = batch
        loss = nn.functional.cross_entropy(self.network(inputs), targets)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Keeps the epoch's loss, a mean over the ranks, and what wraps the model until the end of the training."""
        self.means.append(self.trainer.callback_metrics["loss"].item())
        self.wrapped = [self.trainer.strategy.model]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


backend = common.start()
ddp.DistributedDataParallel = nn.parallel.DistributedDataParallel
lightning.seed_everything(0, verbose=False)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy=ddp.DDPStrategy(process_group_backend=backend),
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
classifier = Classifier()
trainer.fit(
    classifier, DataLoader(TensorDataset(*common.samples(200)), batch_size=10, shuffle=True)
)
common.report(classifier.means, classifier.network.state_dict(), wrapped=classifier.wrapped[0])
