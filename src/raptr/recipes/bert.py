"""Recipes for BERT: small ones for two CPU cores or one GPU, and the paper's settings for larger machines.

A recipe other than `demo` names no text; `--data` does. The paper gives AdamW, the peak learning rate, the warm-up and
the decay in the last stage, but not beta2, epsilon, weight decay, clipping or dropout: those values are ours (the
optimizer's are in `train/optimizer.py`; beta2 is 0.98, epsilon 1e-6).
"""

from typing import Any

Recipe = dict[str, dict[str, Any]]


def demo() -> Recipe:
    """A tiny BERT on the text of the Python standard library; takes about a minute on two CPU cores.

    Command: raptr pretrain
    """
    return {
        "model": {"size": "tiny"},
        "method": {"name": "raptr"},
        "data": {"source": "builtin", "vocabulary": 2048, "length": 64},
        "optimizer": {"peak": 1e-3, "warmup": 40},
        "train": {"steps": 800, "batch": 16, "eval_samples": 256},
    }


def bert_mini() -> Recipe:
    """A 12-layer BERT of width 256, for one GPU, with the method that was best in the nearest measurement.

    Size, steps, tokens per step and learning rate are those of docs/results/evidence.md.

    Command: raptr pretrain bert-mini --data FOLDER
    """
    return {
        "model": {"size": "mini"},
        "method": {"name": "auto"},
        "optimizer": {"peak": 2e-3, "warmup": 300},
        "train": {"steps": 5800, "batch": 256, "eval_samples": 1024},
    }


def bert_base() -> Recipe:
    """The paper's BERT-Base: 675k steps, batch 256, 6-8-10-12 Equal, square-root scaling, idle parameters get zeros.

    The paper trains on Wikipedia and Books. It gives neither the length of its sequences nor the size of its
    vocabulary: the values here, and in bert-large, are ours.

    Command: raptr pretrain bert-base --data FOLDER
    """
    return {
        "model": {"size": "base", "dropout": 0.1},
        "method": {"name": "raptr", "schedule": "6-8-10-12", "lengths": "equal", "scaling": "sqrt"},
        "data": {"vocabulary": 30_000, "length": 128},
        "optimizer": {"peak": 1e-4, "warmup": 10_000, "idle": "zero"},
        "train": {"steps": 675_000, "batch": 256, "eval_samples": 4096},
    }


def bert_large() -> Recipe:
    """The paper's longest BERT-Large: 6-12-18-24 Equal, batch 512, square-root scaling, idle parameters get zeros.

    The paper states its FLOPs as 625k steps of full training. This schedule costs 0.625 of full training's layer FLOPs
    per step, so RaPTr takes one million steps; the paper does not print that number.

    Command: raptr pretrain bert-large --data FOLDER
    """
    return {
        "model": {"size": "large", "dropout": 0.1},
        "method": {"name": "raptr", "schedule": "6-12-18-24", "lengths": "equal", "scaling": "sqrt"},
        "data": {"vocabulary": 30_000, "length": 128},
        "optimizer": {"peak": 1e-4, "warmup": 10_000, "idle": "zero"},
        "train": {"steps": 1_000_000, "batch": 512, "accumulate": 2, "eval_samples": 4096},
    }
