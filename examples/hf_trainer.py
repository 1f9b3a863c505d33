"""Pretrain a small Llama with Hugging Face's Trainer, as its language-modelling example does; raptr's lines are marked.

python examples/hf_trainer.py OUTPUT_FOLDER     (half a minute on one core)
"""

import argparse
import inspect
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, default_data_collator, set_seed

from raptr.integrations.transformers import SubnetworkCallback  # raptr

LENGTH = 64


def rows(text: str) -> list[dict[str, torch.Tensor]]:
    """Return the text's bytes in rows of equal length; the labels are the same tokens, since the model shifts them."""
    tokens = torch.tensor(list(text.encode()))
    blocks = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": block, "labels": block} for block in blocks]


def main(folder: str) -> None:
    """Train for 200 steps, then evaluate the whole model."""
    set_seed(0)
    data = rows(inspect.getsource(argparse))  # any text will do; this one needs no download
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    callback = SubnetworkCallback("progressive-stacking")  # raptr
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=200,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=20,
            eval_strategy="steps",
            eval_steps=100,
            save_steps=100,
            report_to="none",
        ),
        train_dataset=data[64:],
        eval_dataset=data[:64],
        data_collator=default_data_collator,
        callbacks=[callback],  # raptr
    )
    trainer.train()
    print(f"held-out loss {trainer.evaluate()['eval_loss']:.3f}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python examples/hf_trainer.py OUTPUT_FOLDER")
    main(sys.argv[1])
