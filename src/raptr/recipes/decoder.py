"""Recipes for decoders: causal language models like Llama.

A recipe other than `decoder-demo` names no text; `--data` does, with a folder made by `raptr prepare --objective
causal`. The vocabulary sizes here are used by plans only; a prepared folder has its own. The settings of the larger
models are customary ones; we have not tuned them.
"""

from raptr.recipes.bert import Recipe


def decoder_demo() -> Recipe:
    """A tiny decoder on the text of the Python standard library; takes less than two minutes on one CPU core.

    With one thread of a shared two-core machine it took 1 min 49 s, of which 1 min 31 s were training, and reached a
    held-out loss of 4.216: a perplexity of 67.8, or 2.01 bits per byte.

    Command: raptr pretrain decoder-demo
    """
    return {
        "model": {"family": "decoder", "size": "tiny"},
        "method": {"name": "raptr"},
        "data": {"source": "builtin", "vocabulary": 2048, "length": 64},
        "optimizer": {"peak": 3e-3, "warmup": 40},
        "train": {"steps": 600, "batch": 16, "eval_samples": 128},
    }


def decoder_mini() -> Recipe:
    """A 12-layer decoder of width 256, for one GPU, with the method that was best in the nearest measurement.

    Size, steps and tokens per step are those of docs/results/evidence.md. There, full training and progressive stacking
    were best at a learning rate of 0.008, by 0.01 in the loss; RaPTr was best at 0.004, and much worse at 0.008.

    Command: raptr pretrain decoder-mini --data FOLDER
    """
    return {
        "model": {"family": "decoder", "size": "mini"},
        "method": {"name": "auto"},
        "optimizer": {"peak": 4e-3, "warmup": 300},
        "train": {"steps": 5800, "batch": 256, "eval_samples": 1024},
    }


def decoder_100m() -> Recipe:
    """A 12-layer decoder of width 768, with sequences of 512 tokens. Only single steps have been run.

    On one H200, batches of 64 sequences took 18 GiB and ran at 619,000 tokens/s with all layers.

    Command: raptr pretrain decoder-100m --data FOLDER
    """
    return {
        "model": {"family": "decoder", "size": "100m"},
        "method": {"name": "raptr", "schedule": "6-8-10-12"},
        "data": {"vocabulary": 32_768, "length": 512},
        "optimizer": {"peak": 6e-4, "warmup": 2000, "weight_decay": 0.1, "beta2": 0.95},
        "train": {"steps": 50_000, "batch": 128, "eval_samples": 1024},
    }


def decoder_1_6b() -> Recipe:
    """A 24-layer decoder of width 2048, with sequences of 512 tokens. Only single steps have been run.

    On one H200, micro-batches of 32 sequences took 66 GiB and ran at 53,000 tokens/s with all layers: the run would
    take 23 days with the full model, 19 with this schedule. `accumulate` divides the memory of the activations.

    Command: raptr pretrain decoder-1.6b --data FOLDER
    """
    return {
        "model": {"family": "decoder", "size": "1.6b"},
        "method": {"name": "raptr", "schedule": "12-16-20-24", "lengths": "proportional"},
        "data": {"vocabulary": 32_768, "length": 512},
        "optimizer": {"name": "adamw", "peak": 2e-4, "warmup": 2000, "weight_decay": 0.1, "beta2": 0.95},
        "train": {"steps": 400_000, "batch": 512, "accumulate": 16, "eval_samples": 1024},
    }
