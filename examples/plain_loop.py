"""Pretrain a small Llama in a plain PyTorch loop, with accumulated gradients; raptr's lines are marked.

python examples/plain_loop.py     (half a minute on one core)
"""

import argparse
import inspect

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from raptr import idle, stepwise  # raptr

LENGTH, STEPS, MICRO_BATCHES = 64, 200, 2


def main() -> None:
    """Train for 200 steps, evaluating now and then."""
    torch.manual_seed(0)
    tokens = torch.tensor(list(inspect.getsource(argparse).encode()))  # any text will do; this one needs no download
    rows = tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    held_out, rows = rows[:64], rows[64:]
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    steps = stepwise(model, "progressive-stacking", steps=STEPS, optimizer=optimizer)  # raptr
    for step in range(STEPS):
        steps.begin(step)  # raptr
        for _ in range(MICRO_BATCHES):
            batch = rows[torch.randint(len(rows), (8,))]
            loss = model(input_ids=batch, labels=batch).loss / MICRO_BATCHES
            loss.backward()
        steps.end()  # raptr
        idle(optimizer, "skip")  # raptr: layers that did not run are left alone
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            steps.begin_evaluation(step + 1)  # raptr: the layers that the model has by now
            with torch.no_grad():
                loss = model(input_ids=held_out, labels=held_out).loss
            steps.close()  # raptr
            print(f"step {step + 1}: {steps.size} layers ran, FLOPs {steps.flops:.2f}, held-out loss {loss:.3f}")


if __name__ == "__main__":
    main()
