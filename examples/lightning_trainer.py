"""Pretrain a small Llama with Lightning; raptr's lines are marked.

python examples/lightning_trainer.py OUTPUT_FOLDER     (half a minute on one core)
"""

import argparse
import inspect
import sys
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from raptr.integrations.lightning import SubnetworkCallback  # raptr

LENGTH = 64


class LanguageModel(LightningModule):
    """A stock model, its loss and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))

    def training_step(self, tokens: Tensor, _index: int) -> Any:
        """Return the loss of the layers that run in this step."""
        return self.model(input_ids=tokens, labels=tokens).loss

    def validation_step(self, tokens: Tensor, _index: int) -> None:
        """Log the held-out loss of the layers that the method evaluates."""
        self.log("held_out_loss", self.model(input_ids=tokens, labels=tokens).loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return one optimizer for all parameters."""
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main(folder: str) -> None:
    """Train for 200 steps, validating every 50."""
    seed_everything(0)
    tokens = torch.tensor(list(inspect.getsource(argparse).encode()))  # any text will do; this one needs no download
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    callback = SubnetworkCallback("progressive-stacking")  # raptr
    trainer = Trainer(
        default_root_dir=folder,
        max_steps=200,
        val_check_interval=50,
        check_val_every_n_epoch=None,
        gradient_clip_val=1.0,
        logger=False,
        callbacks=[callback],  # raptr
    )
    trainer.fit(LanguageModel(), DataLoader(rows[64:], batch_size=16, shuffle=True), DataLoader(rows[:64], 64))
    print(f"held-out loss {trainer.callback_metrics['held_out_loss']:.3f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/lightning_trainer.py OUTPUT_FOLDER")
    main(sys.argv[1])
