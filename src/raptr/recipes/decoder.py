"""Decoder runs, complete: causal language models of Llama's kind.

A recipe other than `decoder-demo` names no text: `--data` does, with a folder made by `raptr prepare --objective
causal`. The vocabularies named here are those of plans; a prepared folder has its own. The settings of the larger ones
are customary for such models; we have not tuned them.
"""

from raptr.recipes.bert import Recipe


def decoder_demo() -> Recipe:
    """A tiny decoder on the Python standard library's own text, in less than two minutes on one CPU core.

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
    """A 12-layer decoder of width 256, for one GPU, by the method that was best in the nearest measurement.

    The size, the steps and the tokens of a step are those of docs/results/evidence.md. Full training and progressive
    stacking were best at a learning rate of 0.008 there, by 0.01; RaPTr was best at 0.004, and much worse at 0.008.

    Command: raptr pretrain decoder-mini --data FOLDER
    """
    return {
        "model": {"family": "decoder", "size": "mini"},
        "method": {"name": "auto"},
        "optimizer": {"peak": 4e-3, "warmup": 300},
        "train": {"steps": 5800, "batch": 256, "eval_samples": 1024},
    }


def decoder_100m() -> Recipe:
    """A 12-layer decoder of width 768, sequences of 512 tokens; only single steps have been run.

    On one H200 64 sequences took 18 GiB and gave 619,000 tokens/s with all layers.

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
    """A 24-layer decoder of width 2048, sequences of 512 tokens. Only single steps have been run.

    On one H200, micro-batches of 32 sequences took 66 GiB and gave 53,000 tokens/s with all layers: 23 days for the
    full model, 19 for this schedule. `accumulate` divides the memory of the activations.

    Command: raptr pretrain decoder-1.6b --data FOLDER
    """
    return {
        "model": {"family": "decoder", "size": "1.6b"},
        "method": {"name": "raptr", "schedule": "12-16-20-24", "lengths": "proportional"},
        "data": {"vocabulary": 32_768, "length": 512},
        "optimizer": {"name": "adamw", "peak": 2e-4, "warmup": 2000, "weight_decay": 0.1, "beta2": 0.95},
        "train": {"steps": 400_000, "batch": 512, "accumulate": 16, "eval_samples": 1024},
    }
