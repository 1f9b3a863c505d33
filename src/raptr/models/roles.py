"""The role of each parameter: matrix, embedding, gain or bias.

A role follows from the type of the module that holds the parameter and from its name there, not from its number of
dimensions. It decides initial values (`init.py`), weight decay and the optimizer (`train/optimizer.py`). A parameter
without a known role is an error, because a guess would silently train a wrong model.
"""

from typing import Literal

from torch import nn

Role = Literal["matrix", "embedding", "gain", "bias"]
MATRICES, EMBEDDINGS, NORMS = (nn.Linear,), (nn.Embedding,), (nn.LayerNorm, nn.RMSNorm)


def roles(model: nn.Module) -> dict[str, Role]:
    """Return the role of every parameter by its name in `named_parameters`, or raise ValueError if one is unknown."""
    named = {name for name, _ in model.named_parameters()}  # has a shared parameter only once, under its first name
    return {
        name: _role(module, key, name)
        for path, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
        if (name := f"{path}.{key}" if path else key) in named
    }


def layer_matrices(model: nn.Module) -> set[str]:
    """Return the names of the matrices in the layers, i.e. in lists of modules; matrices of a head are left out."""
    lists = tuple(f"{path}." for path, module in model.named_modules() if path and isinstance(module, nn.ModuleList))
    return {name for name, role in roles(model).items() if role == "matrix" and name.startswith(lists)}


def _role(module: nn.Module, key: str, name: str) -> Role:
    if key == "bias" or key.endswith("_bias"):
        return "bias"
    if key == "weight":
        if isinstance(module, MATRICES):
            return "matrix"
        if isinstance(module, EMBEDDINGS):
            return "embedding"
        if isinstance(module, NORMS):
            return "gain"
    kinds = ", ".join(kind.__name__ for kind in (*MATRICES, *EMBEDDINGS, *NORMS))
    raise ValueError(
        f"parameter {name} of a {type(module).__name__} has no known role: the weight of {kinds}, and any name that "
        "ends in bias are allowed. Add its module to raptr/models/roles.py."
    )
