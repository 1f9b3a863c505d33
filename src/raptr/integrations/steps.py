"""A method in any PyTorch loop, without a `with`: a step's subnetwork runs between `begin(step)` and `end()`.

    steps = stepwise(model, "raptr", steps=1000, schedule="3-4-5-6")
    for step, batch in enumerate(batches):
        steps.begin(step)
        model(**batch).loss.backward()
        steps.end()
        idle(optimizer, "skip")
        optimizer.step()
        optimizer.zero_grad()

`begin` enters `raptr.running` and `end` leaves it, so all that is said in `raptr.models.attach` holds. `end` comes
after the backward pass (of all micro-batches), so that what is recomputed there is computed with the same subnetwork.
A method that grows the model needs its optimizer, `stepwise(..., optimizer=optimizer)`: see `inplace`.

A step that an exception cut short must not leave a part of the model behind. In a `finally` clause `end` only brings
the whole model back. Without one, these bring it back: the next `begin` (an error, since an `end` is missing),
`load_state_dict`, and a call of the model in evaluation mode without gradients (a warning each).
"""

import json
import sys
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
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
    """A model and a method whose steps are begun and ended; made by `stepwise`."""

    def __init__(self, routed: Routed, method: Method, optimizers: Sequence[Optimizer] = ()) -> None:
        self.routed, self.method = routed, method
        self.inplace = InPlace(routed, method, optimizers)
        # Counted at each `end`: the steps, the layers that ran in all of them (a layer of which a part ran counts by
        # its FLOPs), and the last one's stage and size.
        self.steps_run = 0
        self.layers_run = 0.0
        self.stage = self.size = 0
        self._step: int | None = None
        self._last: int | None = None  # the last step that was begun, since weights were loaded
        self._ran: int | None = None  # the last step that was closed after the model had run in it
        self._subnetwork: Subnetwork | None = None
        self._handled: BaseException | None = None  # a whole training may run in an `except` clause
        self._running: AbstractContextManager[None] | None = None
        self._hooks: list[RemovableHandle] = []

    @property
    def step(self) -> int | None:
        """The step that was begun and not ended; None outside of steps."""
        return self._step

    def begin(self, step: int) -> None:
        """Let the model run the subnetwork of step `step` until `end`; at the start of a stage, grow it first.

        After a resume, and after going back to an earlier step, the weights are taken to be those that the steps
        before `step` left.
        """
        unfinished = self._step
        self.close()
        if unfinished is not None:
            raise RuntimeError(
                f"begin({step}): step {unfinished} was begun and not ended; the whole model is back. Call end() after "
                "each step's backward pass, in a finally clause if the loop goes on after exceptions."
            )
        if self._last is None:
            self.inplace.check(self.method)  # the model may have been frozen, adapted or sharded since it was attached
        if step == 0 and self._last is None:  # later the layers are those of this training
            _warn_of_trained(self)
        subnetwork = self.inplace.placed(self.method.subnetwork(step))
        first = step if self._last is None or step < self._last else self._last + 1
        self.inplace.check_left_out(first, step)
        self.inplace.grow(first, step)
        self._last = step
        self._enter(subnetwork)
        self._step, self._subnetwork, self._handled = step, subnetwork, sys.exception()
        model = self.routed.model
        # Functions of their own, not bound methods: a deep copy of the model would copy what they are bound to.
        self._hooks = [
            model.register_forward_pre_hook(lambda module, _args: self._evaluated(module)),
            model.register_load_state_dict_pre_hook(  # type: ignore[no-untyped-call]
                lambda *_args: self._cut_short("load_state_dict was called")
            ),
        ]

    def begin_evaluation(self, step: int) -> None:
        """Let the model run as the method judges it after `step` steps, until `close`."""
        self.close()
        self._enter(self._judged(step))

    def expect_evaluation(self, step: int) -> None:
        """Let calls in evaluation mode without gradients run as the method judges it, until `begin` or `close`."""
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
        """End the step: the whole model is back.

        An error if the model did not run in it; a part of the step that was closed counts too.
        """
        if self._step is None:
            raise RuntimeError(
                "end(): no step is open. Call begin(step) before the forward pass. A call of the model in evaluation "
                "mode without gradients, or load_state_dict, has closed a step that was begun."
            )
        step, context = self._step, self._running
        if sys.exception() is not self._handled:  # in a `finally` clause: the exception says what went wrong
            self.close()
            return
        if self._ran == step:  # micro-batches of Lightning are closed one by one, and the last may be left out
            self.close()
        else:
            assert context is not None
            self._step = self._running = None
            self._unhook()
            context.__exit__(None, None, None)  # an error if the model did not run
        assert self._subnetwork is not None
        self.stage, self.size = self.method.phase_index(step) + 1, self._subnetwork.size
        self.steps_run += 1
        self.layers_run += self.routed.layers_run(self._subnetwork)

    def close(self) -> None:
        """Bring the whole model back, whether or not anything was begun, without counting a step."""
        self._unhook()
        self._leave()

    @property
    def flops(self) -> float:
        """The layers' FLOPs spent in the steps so far, relative to full training of as many steps."""
        return self.layers_run / (self.steps_run * self.routed.layers) if self.steps_run else 1.0

    def metrics(self) -> dict[str, float]:
        """What trainers log after a step."""
        return {"raptr/stage": self.stage, "raptr/size": self.size, "raptr/flops": self.flops}

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps: the resolved method, to be compared on resume, and what was counted."""
        return {"method": _resolved(self.method), "steps_run": self.steps_run, "layers_run": self.layers_run}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on counting from a checkpoint's `state`; a method with other settings is refused."""
        # Made anew, so that a checkpoint from before there was a setting has its default.
        before = _resolved(make_method(**state["method"], shape=self.method.target))
        now = _resolved(self.method)
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
        """Leave `running` as an exception would, which asks no questions."""
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
        # The hooks stay until the next call of `begin`, `end` or `close`: this is called from one of them.
        if self._step is not None:
            step = self._step
            self._leave()
            warnings.warn(
                f"{why} while step {step} was begun and not ended; the whole model is back",
                RuntimeWarning,
                stacklevel=3,
            )


def _resolved(method: Method) -> dict[str, Any]:
    """The method and its settings as a checkpoint keeps them."""
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

    A method that grows needs the `optimizer`, or all of them, to copy what it knows about a layer. `blocks` names the
    list of residual blocks (or the lists) where `attach` cannot tell, and `mlp_parts` is the number of parts that their
    MLPs are cut into; `compile` compiles each of the blocks.
    """
    routed = attach(model, blocks, mlp_parts=mlp_parts)
    for axis in WIDTHS:
        if settings.get(axis) is not None:
            routed.need(axis, f"{axis} is {settings[axis]!r}")
    shape = routed.shape
    if issubclass(METHODS.get(method, Method), Growing) and len(routed.lists) > 1:
        shape = replace(shape, layers=_common_length(method, routed))
    made = make_method(method, shape=shape, steps=steps, seed=seed, **settings)
    if made.settings().get("scaled") == "branches":
        raise ValueError(
            f"method {method} has scaled='branches', and the branches of other people's blocks cannot be scaled. "
            "Add scaled='layer'."
        )
    if compile:
        for block in routed.blocks:
            if block._compiled_call_impl is None:
                block.compile()
    return Steps(routed, made, [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer))


def _common_length(method: str, routed: Routed) -> int:
    """The length of each of several lists, which grow at the same time."""
    first, *others = lengths = [len(blocks.module) for blocks in routed.lists]
    if set(others) != {first}:
        raise ValueError(
            f"method {method} grows several lists of blocks only if they are of one length; those at {routed.path!r} "
            f"have {', '.join(map(str, lengths))} blocks. Name one list, or use a method of constant shape, such as "
            "raptr."
        )
    return first


def warn_of_scales(method: Method) -> None:
    """Warn where the trained model needs scales, which nobody gives it after training."""
    if set(method.evaluated(method.steps).scales) != {1.0}:
        warnings.warn(
            f"method {method.name} never trains the whole model as it stands: evaluated after training without the "
            "scales that the method gives its layers, it has a loss that is too high. Method raptr ends with a plain "
            "model.",
            stacklevel=3,
        )


def warn_of_missing(method: Method, step: int) -> None:
    """Warn where the weights after `step` steps are those of a model that has yet to grow."""
    had, layers = method.evaluated(step).layers, method.target.layers
    if had < layers:
        warnings.warn(
            f"these are the weights of step {step:,} of {method.steps:,}, when the model of method {method.name} had "
            f"{had} of its {layers} layers: the others are not trained. Use weights from the last stage.",
            stacklevel=3,
        )


def go_on(steps: Steps, step: int, saved: dict[str, Any] | None) -> None:
    """Go on from a trainer's weights of `step`; `saved` is the method's state there, None if there was no method.

    Layers that were trained without it must not be overwritten when it grows.
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
    """Warn where growth will overwrite weights that were trained before."""
    trained, first = steps.inplace.trained_before(), not dist.is_initialized() or dist.get_rank() == 0
    if trained and first:
        warnings.warn(
            f"method {steps.method.name} overwrites {len(trained)} of the {steps.routed.layers} layers at "
            f"{steps.routed.path!r}, which were loaded or trained before, with copies of lower layers: it is for "
            "training from random weights. Methods such as raptr and pld keep all weights.",
            stacklevel=3,
        )


def idle_policy(steps: Steps, given: Policy | None) -> Policy:
    """The policy for idle parameters: as given, or as the method needs; a given `skip` that cannot be is refused.

    Sharded checkpoints are read as a whole, so there a layer that is not yet part of the model needs optimizer state
    too. What `zero` makes of it is overwritten when the model grows.
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
    """Whether the method ever leaves out a layer."""
    return any(phase.size < method.target.layers for phase in method.phases())


def _evaluating(module: nn.Module) -> bool:
    return not module.training and not torch.is_grad_enabled()
