"""Run by two processes: trainings with both callbacks under DDP and FSDP2; the first one writes what came out.

python -m torch.distributed.run --nproc_per_node 2 -m tests.integrations.launched FOLDER
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.dataclasses import DistributedType, FullyShardedDataParallelPlugin
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, DistributedSampler

from tests.integrations import test_lightning
from tests.integrations.test_transformers import losses, raptr, trainer, weights
from tests.integrations.tiny import Rows

CHECKPOINTED: dict[str, Any] = {"gradient_checkpointing": True, "ddp_find_unused_parameters": True}
NARROW: dict[str, Any] = {"idle": "zero", "heads": "1-1-2-2", "parts": "1-2-3-4"}
ACCUMULATED: dict[str, Any] = {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2}


def callback(make: Callable[..., Any], *, growing: bool = False, **settings: Any) -> Any:
    """A callback of one of the trainers, for RaPTr or for a model that grows at steps 3 and 7."""
    like = make(**settings)
    return type(like)("progressive-stacking", schedule="2-3-6", **settings) if growing else like


def outcome(folder: Path, *, sharded: bool = False, resume: bool = False, **settings: Any) -> dict[str, Any]:
    """The losses of a run, a sum over its weights on each process, and the layers without gradients in step 0."""
    names = ("growing", "idle", "schedule", "heads", "parts")
    method = {name: settings.pop(name) for name in names if name in settings}
    run = trainer(folder, callback(raptr, **method), **{"per_device_train_batch_size": 4, **settings})
    if sharded:  # what `accelerate launch` decides from its configuration, on a GPU only
        state = run.accelerator.state
        state.distributed_type = DistributedType.FSDP
        state.fsdp_plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
            cpu_ram_efficient_loading=False,
        )
        run.is_fsdp_enabled = True
    try:
        run.train(resume_from_checkpoint=resume)
    finally:
        if sharded:
            state.distributed_type = DistributedType.MULTI_CPU
            state.fsdp_plugin = None
    total = total_of(weights(run))
    totals: list[Any] = [None, None]
    dist.all_gather_object(totals, total)
    return {"losses": losses(run), "totals": totals, "wrapped": type(run.model_wrapped).__name__}


def total_of(state: Mapping[str, Tensor]) -> float:
    """The sum over all weights."""
    return sum((w.full_tensor() if isinstance(w, DTensor) else w).double().sum().item() for w in state.values())


def resumed(folder: Path, **settings: Any) -> dict[str, Any]:
    """A sharded run that is stopped at step 5 and resumed, and the undisturbed one's losses."""
    saving = {"save_strategy": "steps", "save_steps": 5, **settings}
    undisturbed = outcome(folder, sharded=True, **saving)
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "checkpoint-10")
    dist.barrier()
    return {"undisturbed": undisturbed, "resumed": outcome(folder, sharded=True, resume=True, **saving)}


class Sharded(test_lightning.Module):
    """Shards its blocks as users of `ModelParallelStrategy` do."""

    def configure_model(self) -> None:
        if isinstance(self.model, FSDPModule):
            return
        assert self.device_mesh is not None
        mesh = self.device_mesh["data_parallel"]
        for block in self.model.model.layers:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def lightning_outcome(
    folder: Path, *callbacks: Callback, sharded: bool = False, checkpoint: Path | None = None, **method: Any
) -> dict[str, Any]:
    """The same for Lightning; a loss is the mean over the processes."""
    module = Sharded() if sharded else test_lightning.Module()
    strategy = ModelParallelStrategy(2, 1) if sharded else "ddp_find_unused_parameters_true"
    settings: dict[str, Any] = {"devices": 2, "strategy": strategy, "use_distributed_sampler": False}
    settings["enable_checkpointing"] = bool(callbacks)
    run = test_lightning.trainer(folder, callback(test_lightning.raptr, **method), *callbacks, **settings)
    sampler: DistributedSampler[Any] = DistributedSampler(Rows(), 2, dist.get_rank(), shuffle=False)
    run.fit(module, DataLoader(Rows(), batch_size=4, sampler=sampler), ckpt_path=checkpoint)
    total = total_of(module.state_dict())
    each: list[Any] = [None, None]
    dist.all_gather_object(each, (module.losses, total))
    wrapped = type(module.model).__name__ if sharded else module.wrapped
    means = [(one + two) / 2 for one, two in zip(each[0][0], each[1][0], strict=True)]
    return {"losses": means, "totals": [total for _, total in each], "wrapped": wrapped}


def lightning_resumed(folder: Path, **method: Any) -> dict[str, Any]:
    """A sharded run of Lightning, and its second half resumed from a checkpoint."""
    saving = ModelCheckpoint(folder, "{step}", every_n_train_steps=5, save_top_k=-1)
    undisturbed = lightning_outcome(folder, saving, sharded=True, **method)
    resumed = lightning_outcome(folder, sharded=True, checkpoint=folder / "step=5.ckpt", **method)
    resumed["losses"] = undisturbed["losses"][:5] + resumed["losses"]
    return {"undisturbed": undisturbed, "resumed": resumed}


def refusal(folder: Path, **settings: Any) -> str:
    """What a start with these settings says."""
    try:
        outcome(folder, **settings)
    except ValueError as error:
        return str(error)
    return ""


def main(folder: Path) -> None:
    """Train in every way, one after another."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {
        "ddp": outcome(folder / "ddp"),
        "ddp, zero": outcome(folder / "zero", idle="zero"),
        "ddp, checkpointed": outcome(folder / "checkpointed", **CHECKPOINTED, **ACCUMULATED),
        "fsdp": outcome(folder / "fsdp", sharded=True),
        "fsdp, zero": outcome(folder / "fsdp-zero", sharded=True, idle="zero"),
        "ddp, narrow": outcome(folder / "ddp-narrow", **NARROW, **CHECKPOINTED),
        "fsdp, narrow": outcome(folder / "fsdp-narrow", sharded=True, **NARROW),
        "fsdp, resumed, zero": resumed(folder / "resumed-zero", idle="zero"),
        "fsdp, resumed, skip": resumed(folder / "resumed-skip", schedule="5-5-5-6"),
        "ddp, growing": outcome(folder / "ddp-growing", growing=True),
        "fsdp, growing": outcome(folder / "fsdp-growing", sharded=True, growing=True),
        "fsdp, resumed, growing": resumed(folder / "resumed-growing", growing=True),
        "lightning, growing": lightning_outcome(folder / "lightning-growing", growing=True),
        "lightning, fsdp, growing": lightning_outcome(folder / "lightning-fsdp-growing", sharded=True, growing=True),
        "lightning, resumed, growing": lightning_resumed(folder / "lightning-resumed-growing", growing=True),
        "lightning": lightning_outcome(folder / "lightning"),
        "lightning, narrow": lightning_outcome(folder / "lightning-narrow", **NARROW),
        "lightning, fsdp": lightning_outcome(folder / "lightning-fsdp", sharded=True),
        "lightning, fsdp, narrow": lightning_outcome(folder / "lightning-fsdp-narrow", sharded=True, **NARROW),
        "lightning, resumed, zero": lightning_resumed(folder / "lightning-zero", idle="zero"),
        "lightning, resumed, skip": lightning_resumed(folder / "lightning-skip", schedule="5-5-5-6"),
        "refused": refusal(folder / "refused", gradient_checkpointing=True),
        "refused, static": refusal(folder / "static", ddp_static_graph=True),
    }
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
