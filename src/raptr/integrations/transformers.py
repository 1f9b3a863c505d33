"""The methods in Hugging Face's `Trainer`, with or without `accelerate launch`.

    from raptr.integrations.transformers import SubnetworkCallback

    callback = SubnetworkCallback("progressive-stacking")
    trainer = Trainer(model, args, train_dataset=dataset, callbacks=[callback])

The events of one optimizer step:

    on_step_begin             let the step's subnetwork run, for all of its micro-batches
    (forward, backward, clipping; idle parameters have no gradients, and so add nothing to the norm)
    on_pre_optimizer_step     restore the whole model, apply the policy for idle parameters
    on_step_end               prepare for an evaluation, which runs the model that the method evaluates
    on_log                    add stage, size and FLOPs to the logged training loss

The subnetwork is a function of `global_step`, so resuming needs no state. The checkpoint keeps the method's settings,
so that other settings are refused, and the counts of steps and layers for the FLOPs. The `Trainer` has no event before
an evaluation, so between steps each call of the model in evaluation mode without gradients runs
`method.evaluated(step)`.
"""

import sys
from collections.abc import Sequence
from typing import Any, final

from raptr.extras import TRAINER, require
from raptr.integrations.steps import Steps, drops_layers, go_on, idle_policy, stepwise, warn_of_missing, warn_of_scales
from raptr.train.idle import Policy, idle

require("raptr.integrations.transformers", "trainer", TRAINER)

from accelerate.state import AcceleratorState
from accelerate.utils.dataclasses import DistributedType, DynamoBackend
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler, ExportableState

DDP = (DistributedType.MULTI_CPU, DistributedType.MULTI_GPU, DistributedType.MULTI_XPU, DistributedType.MULTI_NPU)
OTHERS = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


@final
class SubnetworkCallback(TrainerCallback, ExportableState):
    """Trains with a method of raptr, made by `make_method(method, **settings)` for the trainer's number of steps.

    `idle` is the policy for idle parameters (None: the one that the method needs). `blocks` names the list of residual
    blocks, or the lists, if `attach` cannot find it. `compile` compiles each block; use it instead of `torch_compile`,
    which compiles the whole model.
    """

    def __init__(
        self,
        method: str,
        *,
        idle: Policy | None = None,
        blocks: str | Sequence[str] | None = None,
        compile: bool = False,
        seed: int = 0,
        **settings: Any,
    ) -> None:
        if not isinstance(settings.get("schedule"), str | None):
            raise ValueError(
                f"schedule is {settings['schedule']!r}; a text such as '6-8-10-12' is allowed, since the number of "
                "steps is the trainer's"
            )
        self.steps: Steps | None = None
        self._idle = idle
        self._policy: Policy = "skip"  # decided when training begins
        self._made = {"method": method, "blocks": blocks, "compile": compile, "seed": seed, **settings}

    def state(self) -> dict[str, Any]:
        """Return what `trainer_state.json` keeps: the callback's arguments, and its counts so far."""
        saved = None if self.steps is None else self.steps.state()
        return {"args": {"idle": self._idle, **self._made}, "attributes": {"saved": saved}}

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Make the method for this training, and continue from the checkpoint's state if there is one."""
        if self.steps is not None:
            self.steps.close()  # an earlier training that ended with an exception
        model: nn.Module = objects["model"]
        _check_launch(args, model)
        self.steps = stepwise(model, steps=state.max_steps, optimizer=objects["optimizer"], **self._made)
        self._policy = idle_policy(self.steps, self._idle)
        if drops_layers(self.steps.method):
            _check_ddp(args, model)
        # Saving fails if the callback has no entry, as after a resume from a checkpoint made without it.
        callbacks: Any = state.stateful_callbacks
        entry = callbacks.setdefault(type(self).__name__, {})
        if isinstance(entry, list):
            raise ValueError(
                f"the trainer has {len(entry)} callbacks {type(self).__name__}; one is allowed, with one method. Leave "
                "out the others."
            )
        saved = entry.get("attributes", {}).get("saved")
        if state.global_step:
            go_on(self.steps, state.global_step, saved)
        if state.is_world_process_zero:
            warn_of_scales(self.steps.method)
        _put_first(self)
        self.steps.expect_evaluation(state.global_step)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Let the step's subnetwork run, for all of its micro-batches."""
        self._training.begin(state.global_step)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Restore the whole model, and apply the policy for idle parameters."""
        optimizer: Optimizer = objects["optimizer"]
        self._training.end()
        idle(optimizer, self._policy)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Let an evaluation before the next step run the model that the method evaluates."""
        self._training.expect_evaluation(state.global_step)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Close a step that the epoch's end cut off between micro-batches, before the trainer evaluates or saves."""
        self._training.expect_evaluation(state.global_step)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **objects: Any
    ) -> None:
        """Restore the whole model, and warn if it has untrained layers."""
        self._training.close()
        if state.is_world_process_zero:
            loaded = state.best_global_step if args.load_best_model_at_end else None
            warn_of_missing(self._training.method, state.global_step if loaded is None else loaded)

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **objects: Any,
    ) -> None:
        """Add stage, size and FLOPs to a log entry that has a training loss."""
        if logs is not None and "loss" in logs and self.steps is not None:
            logs.update(self.steps.metrics())
            state.log_history[-1].update(self.steps.metrics())

    @property
    def _training(self) -> Steps:
        assert self.steps is not None, "the trainer has not begun"
        return self.steps


def _check_launch(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse launch settings with which a subnetwork cannot run, or runs more slowly than it should."""
    launch = AcceleratorState()
    if launch.dynamo_plugin.backend != DynamoBackend.NO:  # set by torch_compile or by accelerate's configuration
        raise ValueError(
            "torch_compile compiles the whole model, and would compile it again for every choice of layers. Leave it "
            "out and give SubnetworkCallback(..., compile=True), which compiles each block once."
        )
    if args.n_gpu > 1:
        raise ValueError(
            f"the Trainer would use nn.DataParallel on {args.n_gpu} GPUs, whose copies cannot run a subnetwork. "
            "Launch one process for each GPU with torchrun or accelerate launch, or let it see one GPU."
        )
    if launch.distributed_type in OTHERS:
        raise ValueError(
            f"the Trainer runs under {launch.distributed_type.value}, which is not supported: it prepares the model's "
            "layers itself. Use DDP or FSDP2."
        )
    if isinstance(model, FullyShardedDataParallel):
        raise ValueError(
            "the Trainer runs under FSDP1, which is not supported: it flattens parameters, so that those of layers "
            "that did not run cannot be recognised. Use FSDP2 (fsdp_config={'version': 2}, or accelerate's "
            "fsdp_version: 2)."
        )


def _check_ddp(args: TrainingArguments, model: nn.Module) -> None:
    """Refuse settings with which DDP would wait for the gradients of layers that did not run."""
    if AcceleratorState().distributed_type not in DDP:
        return
    if args.ddp_static_graph:
        raise ValueError("ddp_static_graph is True, but each step runs other layers. Leave it out.")
    checkpointing = args.gradient_checkpointing or (
        isinstance(model, PreTrainedModel) and model.is_gradient_checkpointing
    )
    default = not checkpointing  # as in `Trainer`
    find_unused = default if args.ddp_find_unused_parameters is None else args.ddp_find_unused_parameters
    if not find_unused:
        reason = " (the default with gradient checkpointing)" if args.ddp_find_unused_parameters is None else ""
        raise ValueError(
            f"ddp_find_unused_parameters is False{reason}, with which DDP waits for the gradients of layers that did "
            "not run. Set TrainingArguments(ddp_find_unused_parameters=True)."
        )


def _put_first(callback: SubnetworkCallback) -> None:
    """Move the callback before those that report to loggers, so that they see `logs` with its additions.

    The trainer puts its own callbacks first, and a callback has no reference to the list that contains it. So the list
    is taken from the caller's frame: `CallbackHandler.call_event` called `on_train_begin`, which called this function.
    The handler is iterating over this list, but moving the current entry to the front neither repeats nor skips
    another callback.
    """
    handler = sys._getframe(2).f_locals.get("self")
    if isinstance(handler, CallbackHandler) and callback in handler.callbacks:
        handler.callbacks.remove(callback)
        handler.callbacks.insert(0, callback)
