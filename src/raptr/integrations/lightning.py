"""The methods in Lightning's `Trainer`.

    from raptr.integrations.lightning import SubnetworkCallback

    trainer = lightning.Trainer(max_steps=1000, callbacks=[SubnetworkCallback("progressive-stacking")])

The events of one optimizer step:

    on_train_batch_start         let the step's subnetwork run, the same for all of its micro-batches
    (forward, backward)
    on_before_optimizer_step     restore the whole model, apply the policy for idle parameters; clipping follows
    on_train_batch_end           restore the whole model between micro-batches, or log stage, size and FLOPs

The subnetwork is a function of `global_step`, so resuming needs no state. The checkpoint keeps the method's settings,
so that other settings are refused, and the counts of steps and layers for the FLOPs. Validation during training runs
`method.evaluated(step)`.
"""

from collections.abc import Sequence
from typing import Any, final

from raptr.extras import LIGHTNING, require
from raptr.integrations.steps import Steps, drops_layers, go_on, idle_policy, stepwise, warn_of_missing, warn_of_scales
from raptr.train.idle import Policy, idle

require("raptr.integrations.lightning", "lightning", LIGHTNING)

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer


@final
class SubnetworkCallback(Callback):
    """Trains with a method of raptr, made by `make_method(method, **settings)` for the trainer's number of steps.

    `idle` is the policy for idle parameters (None: the one that the method needs). `blocks` names the list of residual
    blocks, or the lists, if `attach` cannot find it. `compile` compiles each block.
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
        self.steps: Steps | None = None
        self._idle = idle
        self._policy: Policy = "skip"  # decided when training begins
        self._made = {"method": method, "blocks": blocks, "compile": compile, "seed": seed, **settings}
        self._saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the method's settings, and the counts so far."""
        return {} if self.steps is None else self.steps.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Store the state from a checkpoint until training begins."""
        self._saved = state_dict

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Warn if a checkpoint that is loaded for evaluation after training has untrained layers."""
        if self.steps is not None and trainer.state.fn != TrainerFn.FITTING and trainer.is_global_zero:
            warn_of_missing(self.steps.method, checkpoint["global_step"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the method for this training, and continue from the checkpoint's state if there is one."""
        _check_launch(trainer, pl_module)
        _check_accumulation(trainer)
        steps = trainer.estimated_stepping_batches
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(
                f"the number of training steps is not known (max_steps={trainer.max_steps}, "
                f"max_epochs={trainer.max_epochs}), and a method plans its stages over it. Set max_steps."
            )
        self.steps = stepwise(pl_module, steps=steps, optimizer=trainer.optimizers, **self._made)
        self._policy = idle_policy(self.steps, self._idle)
        if drops_layers(self.steps.method):
            _check_ddp(trainer)
        if trainer.is_global_zero:
            warn_of_scales(self.steps.method)
        if trainer.global_step:
            go_on(self.steps, trainer.global_step, self._saved)
        self._saved = None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Let the step's subnetwork run."""
        self._training.begin(trainer.global_step)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Restore the whole model, and apply the policy for idle parameters."""
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            self._training.close()  # `training_step` returned None, so Lightning skips the batch
            return
        self._training.end()
        idle(optimizer, self._policy)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Between micro-batches close the step, because a validation may follow; after a full step log its metrics."""
        steps = self._training
        if steps.step is not None:
            steps.close()
        else:
            pl_module.log_dict(steps.metrics(), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn if the model has untrained layers."""
        if trainer.is_global_zero:
            warn_of_missing(self._training.method, trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let validation during training run the model that the method evaluates."""
        if self.steps is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.steps.begin_evaluation(trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the whole model."""
        if self.steps is not None:
            self.steps.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Restore the whole model."""
        if self.steps is not None:
            self.steps.close()

    @property
    def _training(self) -> Steps:
        assert self.steps is not None, "the trainer has not started"
        return self.steps


def _check_launch(trainer: Trainer, module: LightningModule) -> None:
    """Refuse trainer settings with which a subnetwork cannot run, or runs more slowly than it should."""
    if module._compiler_ctx is not None:
        raise ValueError(
            "the LightningModule is compiled as a whole, and would be compiled again for every choice of layers. Give "
            "SubnetworkCallback(..., compile=True), which compiles each block once."
        )
    if not module.automatic_optimization:
        raise ValueError(
            "the LightningModule has automatic_optimization=False, so the callback cannot know which steps its "
            "optimizer takes. Use raptr.stepwise in its training_step."
        )
    if isinstance(trainer.strategy, DeepSpeedStrategy):
        raise ValueError("DeepSpeed is not supported: it prepares the model's layers itself. Use DDP or FSDP2.")
    if isinstance(trainer.strategy, FSDPStrategy):
        raise ValueError(
            "FSDPStrategy is FSDP1, which is not supported: it flattens parameters, so that those of layers that did "
            "not run cannot be recognised. Use ModelParallelStrategy with fully_shard (FSDP2)."
        )


def _check_accumulation(trainer: Trainer) -> None:
    """Refuse epochs with different numbers of steps: Lightning assumes that all have as many as the first."""
    changing = [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler) and len({*callback.scheduling.values()}) > 1
    ]
    if changing and trainer.max_epochs != -1:
        raise ValueError(
            "GradientAccumulationScheduler changes the number of steps in an epoch, so that with "
            f"max_epochs={trainer.max_epochs} it is not known how many there are. Set max_steps, and max_epochs=-1."
        )


def _check_ddp(trainer: Trainer) -> None:
    """Refuse settings with which DDP would wait for the gradients of layers that did not run."""
    model = trainer.strategy.model
    if not isinstance(model, DistributedDataParallel):
        return
    if model.static_graph:
        raise ValueError("DDPStrategy has static_graph=True, but each step runs other layers. Leave it out.")
    if not model.find_unused_parameters:
        raise ValueError(
            "DDPStrategy has find_unused_parameters=False, with which DDP waits for the gradients of layers that did "
            "not run. Use strategy='ddp_find_unused_parameters_true'."
        )
