"""What each parameter of a model is, by the module that holds it and its name there; its dimension does not matter.

Initial values (`init.py`), weight decay and which optimizer takes a parameter (`train/optimizer.py`) follow from it. A
parameter that nothing here covers is an error: a guess would silently train a wrong model.
"""

from typing import Literal

from torch import nn

Role = Literal["matrix", "embedding", "gain", "bias"]
MATRICES, EMBEDDINGS, NORMS = (nn.Linear,), (nn.Embedding,), (nn.LayerNorm, nn.RMSNorm)


def roles(model: nn.Module) -> dict[str, Role]:
    """The role of every parameter, named and ordered as in `named_parameters`."""
    named = {name for name, _ in model.named_parameters()}  # a shared parameter is there once, under its first name
    return {
        name: _role(module, key, name)
        for path, module in model.named_modules()
        for key, _ in module.named_parameters(recurse=False)
        if (name := f"{path}.{key}" if path else key) in named
    }


def layer_matrices(model: nn.Module) -> set[str]:
    """The matrices of the layers, which are the members of a list of modules; those of a head are none of them."""
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
