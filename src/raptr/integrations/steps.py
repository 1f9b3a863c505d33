"""A method in any PyTorch loop, without a `with`: the step's subnetwork runs between `begin(step)` and `end()`.

    steps = stepwise(model, "raptr", steps=1000, schedule="3-4-5-6")
    for step, batch in enumerate(batches):
        steps.begin(step)
        model(**batch).loss.backward()
        steps.end()
        idle(optimizer, "skip")
        optimizer.step()
        optimizer.zero_grad()

`begin` enters `raptr.running` and `end` leaves it, so the docstring of `raptr.models.attach` applies. Call `end` after
the backward pass (of the last micro-batch), so that activations that are recomputed there use the same subnetwork. A
method that grows the model needs its optimizer, `stepwise(..., optimizer=optimizer)`: see `inplace`.

If an exception cuts a step short, the subnetwork must not stay in the model. If `end` is in a `finally` clause, it
restores the whole model there, without counting a step. Otherwise the model is restored by the next `begin`, which then
raises an error because an `end` is missing, or with a warning by `load_state_dict` and by a call of the model in
evaluation mode without gradients.
"""

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any, final

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from raptr.distributed.sharding import is_sharded
from raptr.integrations.inplace import InPlace
from raptr.methods import METHODS, Method, make_method
from raptr.methods.axes import narrowed
from raptr.methods.growing import Growing
from raptr.models.attach import Routed, attach, running
from raptr.subnetworks import Subnetwork
from raptr.subnetworks.value import WIDTHS
from raptr.train.idle import Policy, needed


@final
class Steps:
    """A method in a training loop that marks its steps by `begin` and `end`; made by `stepwise`."""

    def __init__(self, routed: Routed, method: Method, optimizers: Sequence[Optimizer] = ()) -> None:
        self.routed, self.method = routed, method
        self.inplace = InPlace(routed, method, optimizers)
        # Updated at each `end`: the number of steps, the sum of the layers that ran in them (a layer that runs in part
        # counts as its share of the FLOPs), and the last step's stage and size.
        self.steps_run = 0
        self.layers_run = 0.0
        self.stage = self.size = 0
        self._step: int | None = None
        self._last: int | None = None  # the last step that was begun; None before the first and after a resume
        self._ran: int | None = None  # the last step that was closed, by `close`, after a forward pass
        self._subnetwork: Subnetwork | None = None
        self._handled: BaseException | None = None  # handled at `begin`: a training may run in an `except` clause
        self._running: AbstractContextManager[None] | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def step(self) -> int | None:
        """The step that is open, between its `begin` and `end`; None outside of steps."""
        return self._step

    def begin(self, step: int) -> None:
        """Let the model run the subnetwork of step `step` until `end`; at the start of a stage, grow it first.

        On the first call, after a resume, and when it goes back to an earlier step, the weights are assumed to be those
        after the steps before `step`.
        """
        unfinished = self._step
        self.close()
        if unfinished is not None:
            raise RuntimeError(
                f"begin({step}): step {unfinished} was begun and not ended; the whole model is back. Call end() after "
                "each step's backward pass, in a finally clause if the loop goes on after exceptions."
            )
        if self._last is None:
            self.inplace.check(self.method)  # it may have been frozen, adapted or sharded since `attach`
        if step == 0 and self._last is None:  # later on, it is this training that has trained them
            _warn_of_trained(self)
        subnetwork = self.inplace.placed(self.method.subnetwork(step))
        first = step if self._last is None or step < self._last else self._last + 1
        self.inplace.check_left_out(first, step)
        if self._last is not None and self.inplace.unknown_to_optimizers(first, step):
            _warn_of_optimizer(step)
        self.inplace.grow(first, step)
        self._last = step
        self._enter(subnetwork)
        self._step, self._subnetwork, self._handled = step, subnetwork, sys.exception()
        model = self.routed.model
        # Lambdas, not bound methods, because a deep copy of the model would also copy the object they are bound to.
        self._hooks = [
            model.register_forward_pre_hook(lambda module, _args: self._evaluated(module)),
            model.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda *_args: self._cut_short("load_state_dict was called")
            ),
        ]

    def begin_evaluation(self, step: int) -> None:
        """Let the model run the subnetwork that the method evaluates after `step` steps, until `close`."""
        self.close()
        self._enter(self._judged(step))

    def expect_evaluation(self, step: int) -> None:
        """Let calls in evaluation mode without gradients run what the method evaluates, until `begin` or `close`."""
        self.close()
        model, judged = self.routed.model, self._judged(step)
        if judged == Subnetwork.full(self.routed.layers):
            return

        def enter(module: nn.Module) -> None:
            if module is model and _evaluating(module):
                self._enter(judged)

        def leave(module: nn.Module) -> None:
            if module is model:
                self._leave()

        self._hooks = [
            model.register_forward_pre_hook(lambda module, _args: enter(module)),
            model.register_forward_hook(lambda module, _args, _output: leave(module), always_call=True),
        ]

    def end(self) -> None:
        """End the step, and restore the whole model.

        Raise RuntimeError if no step is open, or if the model has not run in this step; micro-batches of the step that
        were closed before count too.
        """
        if self._step is None:
            raise RuntimeError(
                "end(): no step is open. Call begin(step) before the forward pass. A call of the model in evaluation "
                "mode without gradients, or load_state_dict, has closed a step that was begun."
            )
        step, context = self._step, self._running
        if sys.exception() is not self._handled:  # an exception is passing: it says what went wrong
            self.close()
            return
        if self._ran == step:  # Lightning's micro-batches are closed one by one, and the last may be skipped
            self.close()
        else:
            assert context is not None
            self._step = self._running = None
            self._unhook()
            context.__exit__(None, None, None)  # raises an error if the model has not run
        assert self._subnetwork is not None
        self.stage, self.size = self.method.phase_index(step) + 1, self._subnetwork.size
        self.steps_run += 1
        self.layers_run += self.routed.layers_run(self._subnetwork)

    def close(self) -> None:
        """Restore the whole model without counting a step; nothing happens if no step or evaluation is open."""
        self._unhook()
        self._leave()

    @property
    def flops(self) -> float:
        """The layers' FLOPs in the steps so far, relative to as many steps of full training; 1 before the first."""
        return self.layers_run / (self.steps_run * self.routed.layers) if self.steps_run else 1.0

    def metrics(self) -> dict[str, float]:
        """Return the numbers that trainers log after a step."""
        return {"raptr/stage": self.stage, "raptr/size": self.size, "raptr/flops": self.flops}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps: the method's resolved settings, compared on resume, and the counts so far."""
        return {"method": _resolved(self.method), "steps_run": self.steps_run, "layers_run": self.layers_run}

    def resume(self, state: dict[str, Any]) -> None:
        """Continue the counts of a checkpoint's `state`; raise ValueError if its method has other settings."""
        before, now = state["method"], _resolved(self.method)
        # The method is made again, so that settings that are newer than the checkpoint have their defaults. This fails,
        # and is left out, if it has a `Schedule` that cannot be written as text, or if the model had another depth.
        with suppress(ValueError):
            before = _resolved(make_method(**before, shape=self.method.target))
        changed = [key for key in {**before, **now} if before.get(key) != now.get(key)]
        if changed:
            differences = ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)
            raise ValueError(f"the checkpoint was trained with another method: {differences}. Use the same settings.")
        self.steps_run, self.layers_run = state["steps_run"], state["layers_run"]
        self._last = None

    def _judged(self, step: int) -> Subnetwork:
        return self.inplace.placed(self.method.evaluated(step))

    def _enter(self, subnetwork: Subnetwork) -> None:
        context = running(self.routed, subnetwork)
        context.__enter__()
        self._running = context

    def _leave(self) -> None:
        """Leave `running` as an exception would, so that it does not check whether the model has run."""
        if self._step is not None and self.routed.called:
            self._ran = self._step
        context, self._running, self._step = self._running, None, None
        if context is not None:
            context.__exit__(GeneratorExit, GeneratorExit(), None)

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _evaluated(self, module: nn.Module) -> None:
        if module is self.routed.model and _evaluating(module):
            self._cut_short("the model was called in evaluation mode without gradients")

    def _cut_short(self, why: str) -> None:
        # One of the hooks is calling, so they are not removed here but by the next `begin`, `end` or `close`.
        if self._step is not None:
            step = self._step
            self._leave()
            warnings.warn(
                f"{why} while step {step} was begun and not ended; the whole model is back",
                RuntimeWarning,
                stacklevel=3,
            )


def _resolved(method: Method) -> dict[str, Any]:
    """Return the method and its settings in the form that a checkpoint keeps, without tuples."""
    settings = {"name": method.name, "steps": method.steps, "seed": method.seed, **method.settings()}
    resolved: dict[str, Any] = json.loads(json.dumps(settings))
    return resolved


def stepwise(
    model: nn.Module,
    method: str,
    *,
    steps: int,
    blocks: str | Sequence[str] | None = None,
    mlp_parts: int | None = None,
    compile: bool = False,
    optimizer: Optimizer | Iterable[Optimizer] = (),
    seed: int = 0,
    **settings: Any,
) -> Steps:
    """Make the method `method` for `steps` steps of this model; `settings` are those of `make_method`.

    A method that grows needs the `optimizer`, or all optimizers, to copy the state of a layer. `blocks` names the list
    of residual blocks, or the lists, if `attach` cannot find it. `mlp_parts` is the number of parts that each MLP is
    cut into. `compile` compiles each block.
    """
    routed = attach(model, blocks, mlp_parts=mlp_parts)
    for axis in WIDTHS:
        if settings.get(axis) is not None:
            routed.need(axis, f"{axis} is {settings[axis]!r}")
    shape = routed.shape
    if issubclass(METHODS.get(method, Method), Growing) and len(routed.lists) > 1:
        shape = replace(shape, layers=_common_length(method, routed))
    planned = make_method(method, shape=shape, steps=steps, seed=seed, **settings)
    if planned.settings().get("scaled") == "branches":
        raise ValueError(
            f"method {method} has scaled='branches', and the branches of other people's blocks cannot be scaled. "
            "Add scaled='layer'."
        )
    if compile:
        for block in routed.blocks:
            if block._compiled_call_impl is None:
                block.compile()
    return Steps(routed, planned, [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer))


def _common_length(method: str, routed: Routed) -> int:
    """Return the common length of lists that grow at the same time; raise ValueError if their lengths differ."""
    first, *others = lengths = [len(blocks.module) for blocks in routed.lists]
    if set(others) != {first}:
        raise ValueError(
            f"method {method} grows several lists of blocks only if they are of one length; those at {routed.path!r} "
            f"have {', '.join(map(str, lengths))} blocks. Name one list, or use a method of constant shape, such as "
            "raptr."
        )
    return first


def warn_of_scales(method: Method) -> None:
    """Warn if the method evaluates the trained model with scales, which the model does not have after training."""
    if set(method.evaluated(method.steps).scales) != {1.0}:
        warnings.warn(
            f"method {method.name} never trains the whole model as it stands: evaluated after training without the "
            "scales that the method gives its layers, it has a loss that is too high. Method raptr ends with a plain "
            "model.",
            stacklevel=3,
        )


def warn_of_missing(method: Method, step: int) -> None:
    """Warn if the weights after `step` steps are those of a model that has not finished growing."""
    trained, layers = method.evaluated(step).layers, method.target.layers
    if trained < layers:
        warnings.warn(
            f"these are the weights of step {step:,} of {method.steps:,}, when the model of method {method.name} had "
            f"{trained} of its {layers} layers: the others are not trained. Use weights from the last stage.",
            stacklevel=3,
        )


def go_on(steps: Steps, step: int, saved: dict[str, Any] | None) -> None:
    """Continue from a trainer's weights of `step`; `saved` is the method's state, None if none was saved with them.

    Without a saved state a later growth is refused, because it would overwrite trained layers.
    """
    if saved:
        steps.resume(saved)
        return
    ahead = [start for start in steps.inplace.growths if start >= step]
    if ahead:
        raise ValueError(
            f"the weights of step {step:,} are not those of method {steps.method.name} with {steps.method.steps:,} "
            f"steps, whose growth at step {ahead[0]:,} would overwrite trained layers. Train from the start, or use a "
            "method of constant shape, such as raptr."
        )


def _warn_of_trained(steps: Steps) -> None:
    """Warn if a growth will overwrite weights that were loaded or trained before."""
    trained = steps.inplace.trained_before()
    if trained and _first_process():
        warnings.warn(
            f"method {steps.method.name} overwrites {len(trained)} of the {steps.routed.layers} layers at "
            f"{steps.routed.path!r}, which were loaded or trained before, with copies of lower layers: it is for "
            "training from random weights. Methods such as raptr and pld keep all weights.",
            stacklevel=3,
        )


def _warn_of_optimizer(step: int) -> None:
    """Warn at a growth of which the optimizers know nothing."""
    if _first_process():
        warnings.warn(
            f"begin({step}): the model grows, but the optimizer that stepwise knows has no state of the layers that "
            "trained, so the growth cannot copy or reset it. If the loop steps another optimizer, give that one as "
            "stepwise(..., optimizer=...); if it wraps another, the one that is wrapped. An optimizer that keeps no "
            "state needs nothing.",
            RuntimeWarning,
            stacklevel=3,
        )


def _first_process() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def idle_policy(steps: Steps, given: Policy | None) -> Policy:
    """Return the policy for idle parameters: `given`, or else the one that the method needs.

    Raise ValueError if `given` is `skip` and the method reduces heads or MLP parts. A sharded checkpoint is read as a
    whole, so if the model grows, layers that are not yet part of it need optimizer state as well. There `zero` is the
    default; the state that it gives these layers is overwritten when the model grows.
    """
    method = steps.method
    for axis in narrowed(method):
        if given == "skip":
            raise ValueError(
                f"idle is 'skip' with {axis}: those that are idle are slices of weights that have a gradient, so only "
                "'zero' is allowed, which is also the default."
            )
    sharded = any(is_sharded(parameter) for parameter in steps.routed.model.parameters())
    return given or ("zero" if steps.inplace.growths and sharded else needed(method))


def drops_layers(method: Method) -> bool:
    """Whether the method leaves out a layer in any of its stages."""
    return any(phase.size < method.target.layers for phase in method.phases())


def _evaluating(module: nn.Module) -> bool:
    return not module.training and not torch.is_grad_enabled()
