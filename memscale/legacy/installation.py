"""`Installation`: the regions of the plan in force on a wrapped model, and which of them have run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from memscale.algebra import ForwardPatch, Plan, install, uninstall
from memscale.config import Config
from memscale.core import Assembled
from memscale.legacy.huggingface import keep_checkpointing_off, let_checkpointing
from memscale.runtime import Runtime


class Seen(Assembled):
    """The forward `fn` of a region, with a note of whether it has run. `transform` copies `fn` without this wrapper."""

    fn: Callable[..., Any]
    ran = False

    def over(self, fn: Callable[..., Any]) -> Seen:
        """Wraps another forward, and returns this object."""
        self.fn = fn
        return self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.ran = True  # set without reading it first: a compiler would guard on a value that it reads
        return self.fn(*args, **kwargs)

    @property
    def __wrapped__(self) -> Callable[..., Any]:
        return self.fn

    def parts(self) -> tuple[Any, ...]:
        return (self.fn,)

    def reassembled(self, remap: Callable[[Any], Any]) -> Any:
        return remap(self.fn)


class Installation:
    """Puts the regions of one plan after another on a model.

    Args:
        follows: whether later plans may follow; the root's forward is then patched by every plan, so that the regions
            of a later plan are inside of a forward that someone else puts over the root's in between.

    Attributes:
        seen: the regions by path, each with a note of whether the region has run under the present plan.
        had_step: whether a step of the loop has ended under the present plan.
    """

    def __init__(self, follows: bool) -> None:
        self.seen: dict[str, Seen] = {}
        self.had_step = False
        self._root = Seen() if follows else None
        self._patches: list[ForwardPatch] = []
        self._wrapped: list[ForwardPatch] = []  # of the previous plan, still called by someone else's forward

    def put_on(self, model: nn.Module, plan: Plan, runtime: Runtime | None, config: Config) -> None:
        """Installs the regions of `plan` on `model`."""
        if plan and config.enable_checkpointing:
            keep_checkpointing_off(model, config)
        self.seen, self.had_step = {}, False
        self._patches = install(
            model,
            plan.of_functions(),
            runtime=runtime,
            over=lambda path, fn: self.seen.setdefault(path, Seen()).over(fn),
            around_root=None if self._root is None else self._root.over,
            wrapped=self._wrapped,
        )

    def take_off(self, model: nn.Module) -> list[tuple[str, Callable[..., Any]]]:
        """Removes the regions; returns the forwards of others that stay, by the path of their module."""
        paths = {module: path for path, module in model.named_modules()}
        left = [(patch, paths.get(patch.module, ""), on_top) for patch, on_top in uninstall(self._patches)]
        # Someone else's forward that calls a patched one stays around the regions of the next plan too. The root's
        # patch always does: PyTorch reads the root's forward before it runs the hook that plans.
        self._wrapped = [patch for patch, path, _ in left if self.has_run(path)]
        self._wrapped += [] if self._root is None else self._patches[:1]  # modules of other patches may be gone
        self._patches = []
        let_checkpointing(model)
        return [(path, on_top) for _, path, on_top in left]

    def has_run(self, path: str) -> bool:
        """Whether the forward at `path` has run since the plan was installed."""
        seen = self._root if not path and self._root is not None else self.seen.get(path)
        return seen is not None and seen.ran

    def idle(self, kind: str, plan: Plan) -> str | None:
        """Describes the patterns of `plan` of which no region ran in a step; None if each has one."""
        ran = [path for path, region in self.seen.items() if region.ran]
        # A pattern is idle only if all its regions are: single experts, or layers dropped at random, may rest in any
        # one step.
        resting = [rule.pattern for rule in plan.of_functions() if not any(rule.matches(path) for path in ran)]
        if not (self.had_step and self.seen and resting):
            return None
        return (
            f"nothing ran of {', '.join(map(repr, resting))} in a training step of this {kind}, so that the plan "
            "saves nothing there: the loop calls other modules, or another forward replaced theirs (a fused "
            "loss uses lm_head.weight itself); wrap what is called, or turn the fused forward off"
        )
