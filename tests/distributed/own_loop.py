"""A loop of a user's own under stock DDP and `fully_shard`, as docs/distributed.md shows it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from raptr import Schedule, Shape, attach, idle, make_method, running
from raptr.distributed.sharding import whole

LAYERS, STEPS, ROWS = 4, 9, 8
WAYS: dict[str, dict[str, Any]] = {
    "ddp": {"find_unused_parameters": True},
    "ddp, running layers only": {"find_unused_parameters": True, "skip_all_reduce_unused_params": True},  # torch 2.13
    "fully_shard": {},
}


def network() -> nn.TransformerEncoder:
    """A pre-LN encoder of torch's own, always with the same weights."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0, batch_first=True, norm_first=True)
    model = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


def trained(way: str | None) -> dict[str, Tensor]:
    """The weights after some steps, each process with its share of every batch; None: in one process."""
    model = network()
    called: nn.Module = model
    if way == "fully_shard":
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    elif way is not None:
        called = DistributedDataParallel(model, **WAYS[way])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = Schedule.parse("2-3-4", layers=LAYERS, steps=STEPS)
    method = make_method("raptr", shape=Shape(layers=LAYERS), schedule=schedule, seed=5)
    routed = attach(model)
    rank, size = (dist.get_rank(), dist.get_world_size()) if way is not None else (0, 1)
    for step in range(STEPS):
        batch = torch.randn(ROWS, 3, 8, generator=torch.Generator().manual_seed(step)).chunk(size)[rank]
        with running(routed, method.subnetwork(step)):
            called(batch).square().mean().backward()
        idle(optimizer, "skip")
        optimizer.step()
        optimizer.zero_grad()
    return {name: whole(parameter.detach()) for name, parameter in model.named_parameters()}
