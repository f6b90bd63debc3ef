"""`step_in_backward`: each parameter steps as soon as its gradient is complete, and the gradient is freed."""

from __future__ import annotations

import dataclasses
import math
import weakref
from typing import Any, ClassVar

import torch

from memscale.core import ConfigError, CorrectnessError, Misfit, TransformError, by_name, in_process_group, integer
from memscale.optimizers.clipping import TwoPasses
from memscale.optimizers.spent import SpentGradient
from memscale.optimizers.step_parts import PartedOptimizer, StepPart
from memscale.optimizers.transformed import OptimizerTransform
from memscale.regions import never_compiled


@dataclasses.dataclass(frozen=True, repr=False)
class StepInBackward(OptimizerTransform):
    """See `step_in_backward`."""

    spelling: ClassVar[str] = "step_in_backward"

    accumulate: int = 1
    max_norm: float | None = None

    def part(self, optimizer: PartedOptimizer, inner: StepPart) -> StepPart:
        return _InBackward(self, optimizer, inner)


@by_name
def step_in_backward(*, accumulate: int = 1, max_norm: float | None = None) -> OptimizerTransform:
    """An optimizer transform that steps each parameter in backward, as soon as its gradient is complete, and frees it.

    The gradients never exist all at once. The numbers are those of the plain step, bit for bit:

    >>> import torch, memscale as ms
    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = ms.step_in_backward()(torch.optim.AdamW(model.parameters(), lr=0.1))
    >>> before = model.weight.detach().clone()
    >>> model(torch.ones(3, 4)).square().sum().backward()
    >>> torch.equal(model.weight, before)  # the weight has stepped already
    False
    >>> optimizer.step()  # steps parameters that still have a gradient, runs hooks, and counts for a scheduler
    >>> optimizer.zero_grad()

    The loop stays ``backward``, ``step``, ``zero_grad``; each `step` ends what one backward began. A parameter that is
    used several times (tied weights) steps once, when the sum of its gradients is complete. A frozen parameter, and one
    that the loss does not reach, does not step. A gradient that was assigned by hand waits for `step`.

    Args:
        accumulate: how many backward passes make one step. Before the last pass gradients accumulate as usual, and all
            of them are in memory. A parameter that fewer passes have reached steps in `step`.
        max_norm: clips the gradients to this total norm, bit for bit as ``clip_grad_norm_`` does, in two passes over
            one graph. The first, ``loss.backward(retain_graph=True)``, measures each gradient and frees it; the
            second, ``loss.backward()``, computes it again, clips it and steps. The transform must then cover all
            parameters of the optimizer, and `accumulate` must be 1.

    Raises:
        ConfigError: `accumulate` is not an int of at least 1, or `max_norm` is not a positive number, or both are
            given.
        TransformError: on application, if the optimizer does not treat each parameter alone (LBFGS). In backward, for a
            gradient that is sparse or has a graph (``create_graph=True``), for a second backward before `step`, and in
            a job of several processes with whole parameters on each, which averages gradients after they are complete.
            In `step`, for a closure, or with `max_norm` after one pass only. On any read of a freed gradient, for
            example by ``clip_grad_norm_`` (use `max_norm`) or by a loss scale (`LossScale`, ``GradScaler``).
        CorrectnessError: in `step`, if an option of a group, such as ``lr``, was changed after the backward that used
            it, or a gradient was replaced or removed since. With `max_norm`, if the second pass gives other gradients
            than the first (on an accelerator this is known in `step` only, after parameters have stepped).

    An exception inside a backward leaves some parameters stepped and others not; `step` followed by `zero_grad` makes
    the optimizer usable again.

    Cost: saves all gradients but the largest; pays one call of the optimizer per parameter, and with `max_norm` a
    second backward.

    Source: Lv et al., "Full Parameter Fine-tuning for Large Language Models with Limited Resources" (2023), section 3;
    here the optimizer's numbers stay bit for bit the same.
    """
    try:
        accumulate = integer(1)(accumulate)
    except Misfit as misfit:
        raise ConfigError(f"step_in_backward(accumulate={accumulate!r}) {misfit}") from None
    if max_norm is None:
        return StepInBackward(accumulate)
    if isinstance(max_norm, bool) or not isinstance(max_norm, (int, float)) or not 0 < max_norm < math.inf:
        raise ConfigError(f"step_in_backward(max_norm={max_norm!r}) must be positive and finite; None does not clip")
    if accumulate > 1:
        raise ConfigError(
            f"step_in_backward(accumulate={accumulate}, max_norm={max_norm}): the norm of a sum of gradients needs "
            "one graph; put the micro-batches into one loss, or clip without step_in_backward()"
        )
    return StepInBackward(accumulate, float(max_norm))


class _InBackward(StepPart):
    in_backward: ClassVar[bool] = True

    def __init__(self, how: StepInBackward, optimizer: PartedOptimizer, inner: StepPart) -> None:
        super().__init__(how, optimizer, inner)
        # The ids of the parameters that have stepped since the last `step`, with the index of the group of each.
        self.stepped: dict[int, int] = {}
        self._task = -1  # the autograd task of the last backward
        self._zeroed: set[int] = set()  # ids of parameters whose gradients ``zero_grad(set_to_none=False)`` made zero
        self._refused = False  # whether a backward has raised since the last `step`
        self._finished = False  # whether a backward in which parameters stepped has come to its end since
        self._hooks: dict[int, _Hook] = {}
        self._clip = None if how.max_norm is None else TwoPasses(how.max_norm)
        weakref.finalize(optimizer, _remove, self._hooks).atexit = False

    def attend(self, parameters: list[torch.Tensor]) -> None:
        self._check_norm(parameters)
        super().attend(parameters)
        present = {id(parameter) for parameter in parameters}
        for key in [key for key in self._hooks if key not in present]:
            self._hooks.pop(key).handle.remove()
        places = self.optimizer._places()
        for parameter in parameters:
            if parameter.requires_grad and id(parameter) not in self._hooks:  # a frozen parameter gets none yet
                self._hooks[id(parameter)] = _Hook(self, parameter)
            if (hook := self._hooks.get(id(parameter))) is not None:
                hook.number, hook.title = places[id(parameter)]

    def before_step(self, closure: Any) -> None:
        optimizer = self.optimizer
        if closure is not None:
            raise TransformError(
                f"{self.how!r}: step(closure) evaluates the loss inside step(), and parameters would step in its "
                "backward; call backward yourself, then step()"
            )
        for parameter in self.parameters:
            if isinstance(parameter.grad, SpentGradient) and id(parameter) not in self.stepped:
                raise TransformError(
                    f"{self.how!r}: step() again, where the gradient of {parameter.grad.title} has had its step; "
                    "call zero_grad() and backward first"
                )
        now = {id(each): number for number, group in enumerate(optimizer.param_groups) for each in group["params"]}
        if any(now.get(key) != number for key, number in self.stepped.items()):
            raise CorrectnessError(
                f"{self.how!r}: parameters were taken out of a group, or moved, after the backward in which they have "
                "stepped; change param_groups before backward, or after step()"
            )
        if not self._refused:
            self._check_gradients()
        if self._clip is not None:
            self._clip.check()
            self._check_passes()
        if self.stepped and (changed := optimizer._changed_options()):
            raise CorrectnessError(
                f"{self.how!r}: {changed} after the backward whose parameters have stepped with the options before; "
                "set options before backward (a scheduler's step after the optimizer's does)"
            )
        for parameter in self.parameters:
            if id(parameter) in self._zeroed and parameter.grad is None:  # the plain step has zeros here
                parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
        self._zeroed.clear()

    def after_step(self) -> None:
        self.stepped.clear()
        self._refused = self._finished = False
        if self._clip is not None:
            self._clip.clear()
        for hook in self._hooks.values():
            hook.passes = 0
        self.attend(self.parameters)

    def complete(self, hook: _Hook, parameter: torch.Tensor) -> None:
        """Called when this backward has completed the gradient of `parameter`."""
        optimizer, gradient = self.optimizer, parameter.grad
        assert gradient is not None, "backward has just made it"
        if self._task != (task := torch._C._current_graph_task_id()):
            self._task = task
            if not self.stepped:
                optimizer._follow()
        if self._hooks.get(id(parameter)) is not hook:  # the optimizer has the parameter no more
            return
        hook.passes += 1
        if hook.passes < self.how.accumulate:
            return
        if (wrong := self._misfit(hook, parameter, gradient)) is not None:
            self._refused = True
            raise TransformError(f"{self.how!r}: {wrong}")
        if self._clip is not None:
            if hook.passes == 1:
                self._clip.measure(parameter, gradient)
                parameter.grad = None
                return
            self._clip.clip(parameter, gradient, self.parameters)
        if not self.stepped:
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        self.stepped[id(parameter)] = hook.number
        self._zeroed.discard(id(parameter))
        optimizer._advance_in_backward(hook.number, parameter)
        parameter.grad = SpentGradient(gradient, hook.title)

    def _finish(self) -> None:
        self._finished = True

    @property
    def backward_passes(self) -> int:
        return 1 if self._clip is None else 2

    def after_zero_grad(self, zeroed: list[torch.Tensor]) -> None:
        self._zeroed = {id(parameter) for parameter in zeroed}
        if self.stepped:
            return
        for hook in self._hooks.values():  # the gradients so far, measured or summed, belong to a step that was dropped
            hook.passes = 0
        if self._clip is not None:
            self._clip.clear()

    def _check_norm(self, parameters: list[torch.Tensor]) -> None:
        """Raises `TransformError` where the norm would not be that of all gradients."""
        if self._clip is None or not parameters:
            return
        if len(parameters) < sum(len(group["params"]) for group in self.optimizer.param_groups):
            raise TransformError(
                f"{self.how!r} clips by the norm of all gradients of an optimizer, and would have {len(parameters)} of "
                "its parameters here; give all of them the same rules"
            )
        if any(hasattr(parameter, "device_mesh") for parameter in parameters):
            raise TransformError(
                f"{self.how!r}: these parameters are sharded, so the norm would cover one process's shards; leave "
                "max_norm out, or clip without step_in_backward()"
            )

    def _check_gradients(self) -> None:
        """Raises `CorrectnessError` where the plain step would see another gradient than backward has stepped with.

        A loop that continues after an error in backward calls `zero_grad`, which removes all gradients: accepted.
        """
        stepped = [parameter for parameter in self.parameters if id(parameter) in self.stepped]
        wrong = [parameter for parameter in stepped if not isinstance(parameter.grad, SpentGradient)]
        replaced = [parameter for parameter in wrong if parameter.grad is not None]
        if replaced or (wrong and (self._finished or len(wrong) < len(stepped))):
            title = self.optimizer._places()[id((replaced or wrong)[0])][1]
            raise CorrectnessError(
                f"{self.how!r}: the gradient of {title} was {'replaced' if replaced else 'taken away'} after backward, "
                "in which the parameter has stepped; call zero_grad() after step(), and change gradients in a hook "
                "(Tensor.register_hook), or give this parameter an optimizer of its own"
            )

    def _check_passes(self) -> None:
        """Raises `TransformError` for a gradient that only one of the two passes has seen."""
        for parameter in self.parameters:
            hook = self._hooks.get(id(parameter))
            waits = hook is not None and hook.passes == 1
            if waits or (parameter.grad is not None and id(parameter) not in self.stepped):
                title = self.optimizer._places()[id(parameter)][1]
                raise TransformError(
                    f"{self.how!r}: {title} {'was measured and has not stepped' if waits else 'was not measured'}; "
                    "before step() call loss.backward(retain_graph=True), which measures, and loss.backward(), which "
                    "steps. zero_grad() begins again"
                )

    def _misfit(self, hook: _Hook, parameter: torch.Tensor, gradient: torch.Tensor) -> str | None:
        """Returns why `parameter` cannot step now, or None."""
        title = hook.title
        if id(parameter) in self.stepped:
            return (
                f"{title} has stepped in an earlier backward; call step() after each, and for several backward passes "
                f"a step say step_in_backward(accumulate=...), which is {self.how.accumulate} here"
            )
        if gradient.layout is not torch.strided:
            return f"the gradient of {title} is {gradient.layout}; give such parameters an optimizer of their own"
        if gradient.requires_grad:
            return f"the gradient of {title} has a graph that needs the parameter unchanged; leave out create_graph"
        hooks: Any = parameter._post_accumulate_grad_hooks
        others = [each for each in hooks.values() if each is not hook]
        if any(isinstance(each, _Hook) and each.part() is not None for each in others):
            return f"another optimizer steps {title} in backward too; drop one of the two"
        if _has_several_copies(parameter):
            return (
                f"this job has several processes, and the gradient of {title} is averaged over them after it is "
                "complete here; shard the parameters with FSDP2 (fully_shard), or leave this transform out"
            )
        return None


class _Hook:
    """The hook that backward calls when the gradient of one parameter is complete."""

    number: int  # the index of the parameter's group
    title: str

    def __init__(self, part: _InBackward, parameter: torch.Tensor) -> None:
        self.part = weakref.ref(part)
        self.passes = 0  # since the last step
        self.handle = parameter.register_post_accumulate_grad_hook(self)

    @never_compiled
    def __call__(self, parameter: torch.Tensor) -> None:
        part = self.part()
        if part is not None:
            part.complete(self, parameter)


def _remove(hooks: dict[int, _Hook]) -> None:
    for hook in hooks.values():
        hook.handle.remove()


def _has_several_copies(parameter: torch.Tensor) -> bool:
    if not in_process_group() or torch.distributed.get_world_size() == 1:
        return False
    return not hasattr(parameter, "device_mesh")  # a DTensor's gradient is reduced before this hook runs
