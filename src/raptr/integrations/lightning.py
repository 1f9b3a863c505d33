"""The methods inside Lightning's `Trainer`.

    from raptr.integrations.lightning import SubnetworkCallback

    trainer = lightning.Trainer(max_steps=1000, callbacks=[SubnetworkCallback("progressive-stacking")])

The events of one optimizer step:

    on_train_batch_start         the step's subnetwork: the same for all of its micro-batches
    (forward, backward)
    on_before_optimizer_step     the whole model again; idle parameters get what their policy says; then clipping
    on_train_batch_end           the whole model again between micro-batches; stage, size and FLOPs are logged

The subnetwork is a function of `global_step`, so resuming needs no state. The checkpoint keeps the method's settings,
to refuse others, and what was counted. Validation during training runs `method.evaluated(step)`.
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
    """Trains with a method of raptr: `method` and `settings` as for `make_method`, steps as the trainer counts them.

    `idle` says what happens to parameters that did not run (None: what the method needs), `blocks` names the list of
    residual blocks (or the lists) where it is not obvious, and `compile` compiles each of them.
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
        """What a checkpoint keeps: the method, and what was counted."""
        return {} if self.steps is None else self.steps.state()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what a checkpoint kept; used when training begins."""
        self._saved = state_dict

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say so if a checkpoint that is judged after training has layers that are not trained."""
        if self.steps is not None and trainer.state.fn != TrainerFn.FITTING and trainer.is_global_zero:
            warn_of_missing(self.steps.method, checkpoint["global_step"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the method for the steps to come."""
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
        """Bring the whole model back, and treat the parameters that were idle."""
        if all(parameter.grad is None for group in optimizer.param_groups for parameter in group["params"]):
            self._training.close()  # `training_step` returned None: Lightning leaves the batch out
            return
        self._training.end()
        idle(optimizer, self._policy)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Close the step between micro-batches, where a validation may come; log a step that was ended."""
        steps = self._training
        if steps.step is not None:
            steps.close()
        else:
            pl_module.log_dict(steps.metrics(), on_step=True, on_epoch=False, batch_size=1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so if some layers are not trained."""
        if trainer.is_global_zero:
            warn_of_missing(self._training.method, trainer.global_step)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Let the model run as the method judges it."""
        if self.steps is not None and trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking:
            self.steps.begin_evaluation(trainer.global_step)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Bring the whole model back."""
        if self.steps is not None:
            self.steps.close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Bring the whole model back."""
        if self.steps is not None:
            self.steps.close()

    @property
    def _training(self) -> Steps:
        assert self.steps is not None, "the trainer has not started"
        return self.steps


def _check_launch(trainer: Trainer, module: LightningModule) -> None:
    """Refuse ways of training in which a subnetwork cannot run, or not as fast as it should."""
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
    """Refuse epochs of different numbers of steps: Lightning counts them all like the first."""
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
    """Refuse settings with which DDP waits for gradients of layers that did not run."""
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
