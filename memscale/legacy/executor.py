"""`Executor`: what `wrap` did to one model, how to undo it, and how it plans for what comes."""

from __future__ import annotations

import dataclasses
import logging
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from memscale.algebra import ForwardPatch, Method, install, uninstall
from memscale.core import TransformError, format_bytes
from memscale.hardware import Hardware
from memscale.history import keep_measured
from memscale.legacy.comparison import Comparison
from memscale.legacy.decision import Terms, Verdict, decide, hardware_of
from memscale.legacy.headline import headline
from memscale.legacy.hooks import Seen, SeenRoot, idle, is_a_step_of_its_own, leave, listen
from memscale.legacy.huggingface import caches_off, caches_on, keep_checkpointing_off, let_checkpointing
from memscale.legacy.log import LOG, announce, say
from memscale.legacy.offloading import moved_text, runtime_of_plan
from memscale.legacy.optimizing import Optimizing
from memscale.legacy.shapes import MOST_PLANS, PlansByShapes, Shapes, as_batch, shapes_of, with_shapes
from memscale.observability import Metrics, Server, memory_keys, serve
from memscale.planning import ProvenPlan
from memscale.runtime import Runtime

ATTRIBUTE = "_memscale_executor"
#: What `report` says of models that were wrapped and are not any more.
DETACHED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

# What `_begin` makes anew in a copy.
_OF_PROCESS = {
    *("_lock", "_planning", "_own", "_optimizing"),
    *("_verdict", "_headline", "_comparison", "_server"),
}


class Executor:
    """What `wrap` did: its ``model``, ``plan``, ``config``, ``hardware``, ``profile``, ``skipped`` and ``runtime``.

    ``profile`` is that of the model's own step, and None until a batch told what the step is, or where it failed.
    ``step_bytes`` is what that step takes or, without a profile, what stays on the device from step to step.
    ``skipped`` says why the plan is empty, and is None when it is not. ``runtime`` is what the plan's ``offload()``
    moves tensors with, and is None where nothing is offloaded, and after `detach`. ``str`` is a readable report, with
    what was moved so far. A deep copy or a pickle of a wrapped model carries an executor of its own, without the
    profile, which detaches the copy; a deep copy shares the runtime, a pickle makes one with the same settings.
    An executor does not keep its model alive, and once that is gone has only its report.

    It plans at the first call of a training loop if it was given no batch, and again, between two steps, when a batch
    comes that no plan so far was made for; see `docs/wrap.md`.

    >>> import torch, memscale as ms
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    >>> model = torch.nn.Sequential(*blocks)
    >>> config = ms.Config(force_optimize=True, enable_logging=False)
    >>> ms.wrap(model, config)._memscale_executor.plan
    Plan({'*': checkpoint()})
    >>> ms.detach(model)

    Args:
        model: to act on.
        terms: what every plan keeps to.
        verdict: what to do first.
        optimizer: that trains the model; None where it is not known.
        batch: what `verdict` was made for; None for none.
    """

    def __init__(
        self,
        model: nn.Module,
        terms: Terms,
        verdict: Verdict,
        optimizer: torch.optim.Optimizer | None,
        batch: Any,
    ) -> None:
        # Weakly: the executor is an attribute of the model, and a cycle would hold its weights.
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self.config, self._terms = terms.config, terms
        self._caching: list[Any] = []
        self._patches: list[ForwardPatch] = []
        self._wrapped: list[ForwardPatch] = []  # of the plan before, which run inside somebody else's forward
        self._seen: dict[str, Seen] = {}  # the regions, by their paths
        self._root = None if verdict.for_all else SeenRoot(self.before_direct_call)
        self._hook: Any = None  # which is called before what others have put over the model's forward
        self._announced = False  # whether it has been, for the call that comes to the forward next
        self._looked = False  # whether a step has shown which regions run
        self._plans = PlansByShapes()
        self.runtime: Runtime | None = None
        self._moving = terms.runtime  # what all plans that move tensors do so with, once there is one
        self._begin(optimizer)
        self._take(verdict, None if batch is None else shapes_of(batch))

    def _begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """What belongs to this model in this process, and not to its copies."""
        self._lock = threading.RLock()
        self._planning: int | None = None  # the thread that plans
        # That have parameters of the model: to look takes 1 ms a step in a model of 1,000.
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._optimizing = Optimizing(self.config, optimizer)
        self._verdict: Verdict | None = None
        self._headline: str | None = None  # the last that was said
        self._comparison: Comparison | None = None
        self._server: Server | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}
        return {**state, "_model": self.model, "profile": None, "_plans": PlansByShapes(present=self._plans.present)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._model = weakref.ref(state["_model"])
        self._begin(None)

    # -- what there is to know -----------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            TransformError: it is gone: an executor does not keep it alive.
        """
        model = self._model()
        if model is None:
            raise TransformError("the model of this executor is gone; keep the model as long as you need its executor")
        return model

    @property
    def hardware(self) -> Hardware:
        """The model's device, when the plan was made."""
        return self._terms.hardware

    @property
    def is_attached(self) -> bool:
        """Whether the model is there, and wrapped by this."""
        model = self._model()
        return model is not None and model.__dict__.get(ATTRIBUTE) is self

    @property
    def predicted(self) -> dict[str, int]:
        """The predicted peak of a step by kind: what is ``allocated``, and on CUDA what its allocator has reserved."""
        if isinstance(self.plan, ProvenPlan):
            planned = self.plan.evidence.planned
            on_cuda = self.hardware.device_type == "cuda"
            return {"allocated": planned.peak_bytes, **({"reserved": planned.taken_bytes} if on_cuda else {})}
        return {} if self.profile is None or self.plan else {"allocated": self.step_bytes}

    @property
    def predicted_bytes(self) -> int | None:
        """The peak of a step as it is now, None if that was not predicted."""
        return self.predicted.get("allocated")

    @property
    def peak_error(self) -> float | None:
        """By how much of the real peak the predicted one is off; None until that is known."""
        return None if self._comparison is None else self._comparison.peak_error

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is; a CPU if it has none."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @property
    def regions(self) -> tuple[str, ...]:
        """The paths of the plan's regions."""
        return tuple(self._seen)

    @property
    def regions_that_ran(self) -> tuple[str, ...]:
        """The paths of the plan's regions that have run since it was made."""
        return tuple(path for path, seen in self._seen.items() if seen.ran)

    @property
    def metrics_url(self) -> str | None:
        """Where live figures are served; None where ``config.observability_port`` asks for none or is taken."""
        return None if self._server is None else self._server.url

    def as_log(self) -> dict[str, float]:
        """What a training log may say of memory now, in GiB: for ``wandb.log`` and the like, at logging steps.

        >>> import torch, memscale as ms
        >>> model = ms.wrap(torch.nn.Linear(2, 2), ms.Config(enable_logging=False), torch.ones(1, 2))
        >>> sorted(model._memscale_executor.as_log())
        ['memory/predicted_gib']
        """
        return memory_keys(self)

    def step_text(self) -> str:
        """What the untransformed step takes, in a line."""
        if self.profile is None:
            return f"step without memscale: {format_bytes(self.step_bytes)} and activations, which are not known"
        return f"step without memscale: {format_bytes(self.step_bytes)} at its peak, {self.profile.moment}"

    def idle_text(self) -> str | None:
        """What of the plan has not run since it was made, though the model trains; None if all has."""
        if self._root is None or self._plans.present is not None:
            return idle(self._kind, self.plan, self._seen)
        return (
            f"wrap() saw no call of this {self._kind}'s forward in a training step, so that nothing was planned; "
            "wrap the module whose forward the loop calls, or pass sample_input=..."
        )

    def __repr__(self) -> str:
        return f"Executor({self._kind}, {self.plan!r})"

    def __str__(self) -> str:
        verdict = str(self.plan) if self.skipped is None else f"skipped: {self.skipped}"
        lines = [f"{self._kind} on {self.hardware}", self.step_text(), verdict]
        if self._looked and (text := self.idle_text()) is not None:
            lines.append(text)
        lines += self._optimizing.text()
        if self._comparison is not None and self._comparison.text:
            lines.append(self._comparison.text)
        if self.runtime is not None:
            lines.append(moved_text(self.runtime))
        return "\n".join(lines)

    def say(self, message: str) -> None:
        """Log `message` where the config wants it."""
        say(self.config, message)

    def report(self) -> None:
        """Log what is in force, and say it in a line where the last one was another."""
        line = None if self._verdict is None else headline(self.model, self._verdict, self._seen)
        if line not in (None, self._headline):
            announce(self.config, str(line))
            self._headline = line
        self.say(self.step_text())
        if self.skipped is not None:
            self.say(f"{self._kind} stays as it is: {self.skipped}")
            return
        if isinstance(self.plan, ProvenPlan) and self.plan.decision.decision_source != "user_config":
            self.say(f"policy: {self.plan.decision}")
        self.say(f"plan for {self._kind}:\n{self.plan}")
        if self.runtime is not None:
            cap = self.config.max_cpu_offload_gb
            self.say(f"offload() runs with {self.runtime.config}, max_cpu_offload_gb={cap}")

    def serve(self) -> None:
        """Serve live figures, where the config asks for that."""
        if self.config.observability_port is not None and self._server is None:
            self._server = serve(Metrics(self), self.config.observability_port)
            if self._server is not None:
                weakref.finalize(self, self._server.close)
                self.say(f"live figures at {self._server.url}")

    # -- on and off ----------------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Enter the executor into the model and turn Hugging Face caches off."""
        model = self.model
        model.__dict__[ATTRIBUTE] = self
        self._caching = caches_off(model, self.config)
        if self._root is not None:
            self._hook = model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)

    def install(self) -> None:
        """Put the plan's regions on the model."""
        model = self.model
        if self.plan and self.config.enable_checkpointing:
            keep_checkpointing_off(model, self.config)
        self._seen = {}
        self._patches = install(
            model,
            self.plan.of_functions(),
            runtime=self.runtime,
            over=lambda path, fn: self._seen.setdefault(path, Seen()).over(fn),
            around_root=None if self._root is None else self._root.over,
            wrapped=self._wrapped,
        )
        listen(self)

    def install_optimizer(self) -> None:
        """Put the plan's rules for an optimizer on the one that trains the model, if it is known."""
        self._optimizing.follow(self.model, self.plan, self.runtime)

    def uninstall(self) -> list[tuple[str, Callable[..., Any]]]:
        """Take the plan's regions off, and leave what `attach` did; returns the forwards of others that stay."""
        model = self.model
        paths = {module: path for path, module in model.named_modules()}
        left = [(patch, paths.get(patch.module, ""), on_top) for patch, on_top in uninstall(self._patches)]
        # A forward that calls what it was put over stays around the regions of the next plan, too. The root's is looked
        # up before the hooks of a call, one of which is to plan.
        self._wrapped = [patch for patch, path, _ in left if self._has_run(path)]
        self._wrapped += [patch for patch in self._patches if patch.module is model]
        self._patches = []
        let_checkpointing(model)
        return [(path, on_top) for _, path, on_top in left]

    def detach(self) -> None:
        """Undo everything; does nothing the second time.

        >>> import torch
        >>> from memscale.legacy.verbs import wrap
        >>> model = torch.nn.Linear(2, 2)
        >>> before = dict(model.__dict__)
        >>> wrap(model)._memscale_executor.detach()
        >>> model.__dict__ == before
        True
        """
        with self._lock:
            if self.model.__dict__.get(ATTRIBUTE) is self:
                text = str(self)
                self._detach(self.model)
                DETACHED[self.model] = text

    def _detach(self, model: nn.Module) -> None:
        for path, on_top in self.uninstall():
            # What a step has shown to call the region is a wrapper, and takes nothing away.
            LOG.log(
                logging.INFO if self._has_run(path) else logging.WARNING,
                "the forward of %s was replaced by %s.%s after wrap(): that stays, over the forward of before",
                repr(path) if path else f"the {self._kind}",
                on_top.__module__,
                getattr(on_top, "__qualname__", type(on_top).__qualname__),
            )
        self._seen, self._wrapped = {}, []
        self._optimizing.release()
        leave(self)
        if self._hook is not None:
            self._hook.remove()
        if self._server is not None:
            self._server.close()
        self._server = None
        caches_on(model, self._caching)
        del model.__dict__[ATTRIBUTE]
        moved = "" if self.runtime is None else f"; {moved_text(self.runtime)}"
        self.runtime, self._moving, self._terms = None, None, dataclasses.replace(self._terms, runtime=None)
        self._plans.known.clear()
        self.say(f"detached {self._kind}{moved}")

    def _has_run(self, path: str) -> bool:
        seen = self._root if not path and self._root is not None else self._seen.get(path)
        return seen is not None and seen.ran

    # -- plans for the batches that come -------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A hook of the model: what others put over its forward, autocast say, is not to be entered twice."""
        if torch.compiler.is_compiling() or model is not self._model():
            return
        if self._planning not in (None, threading.get_ident()):
            with self._lock:  # until the model has its regions again
                pass
        if torch.is_grad_enabled() and self._planning is None:
            self.before_call(args, kwargs)
            self._announced = True

    def before_direct_call(self, args: Any, kwargs: Any) -> None:
        """Called in the forward: who calls that itself, as `model.forward(x)`, passes by the hooks of the model."""
        if not self._announced and isinstance(self.model.__dict__["forward"], Method):  # with nobody's around it
            self.before_call(args, kwargs)
        self._announced = False

    def before_call(self, args: Any, kwargs: Any) -> None:
        """Called with the arguments of each call of the model with gradients: plan, where no plan is for these."""
        shapes = shapes_of((args, kwargs))
        if not self._plans.serves(shapes):
            model = self._model()
            if model is None or not is_a_step_of_its_own(model):
                return
            with self._lock:
                if model.__dict__.get(ATTRIBUTE) is not self:
                    return
                if (wanted := self._plans.due(shapes)) is not None:
                    self._follow(model, args, kwargs, wanted)
        self._plans.between_steps = False

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has made a step: if it is this model's, another plan may follow now."""
        model = self._model()
        if model is None:
            return
        if optimizer not in self._own:
            own = {id(parameter) for parameter in model.parameters()}
            if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
                return
            self._own.add(optimizer)
        self._plans.between_steps = True
        self._optimizing.stepped(model, optimizer)
        if self._server is not None:
            self._server.metrics.after_step()
        if not self._looked:
            self._looked = True
            if (text := self.idle_text()) is not None:
                LOG.warning("%s", text)
        if self._comparison is not None:
            self._comparison.after_step(model, optimizer)

    def _follow(self, model: nn.Module, args: Any, kwargs: Any, shapes: Shapes) -> None:
        """Another plan for `shapes`: one that there is, or a new one."""
        found = self._plans.find(shapes)
        if found is not None and found[0] is self._verdict:
            self.say(f"{MOST_PLANS} plans for batches of different shapes are enough: the last one stays")
            self._plans.present = shapes
            return
        self.uninstall()
        try:
            self._take(*(found or self._planned(model, args, kwargs, shapes)))
        finally:
            self.install()
            self.install_optimizer()
        self.report()

    def _planned(self, model: nn.Module, args: Any, kwargs: Any, shapes: Shapes) -> tuple[Verdict, Shapes]:
        """The verdict on a call, and the shapes that it is for."""
        batch = as_batch(model.forward, args, kwargs)
        self._terms = dataclasses.replace(self._terms, hardware=hardware_of(model))
        self._planning = threading.get_ident()
        try:
            for wanted in [shapes] if batch is None else self._plans.to_try(shapes):
                self.say(f"planning for a batch of shapes {', '.join(map(str, wanted))}")
                given = None if batch is None else with_shapes(batch, wanted)
                verdict = decide(model, given, self._optimizing.plain(), self._terms)
                if verdict.profile is not None:
                    return verdict, wanted
                self._plans.refused.append(wanted)
            return verdict, shapes
        finally:
            self._planning = None

    def _take(self, verdict: Verdict, shapes: Shapes | None) -> None:
        """Make `verdict`, for a batch of `shapes`, what is in force."""
        moves = any(rule.transform.moves for rule in verdict.plan)
        if moves and self._moving is None:
            self._moving = runtime_of_plan(self.model, self.config)
        self.runtime = self._moving if moves else None
        self._plans.take(verdict, shapes)
        self._verdict = verdict
        self.plan, self.profile = verdict.plan, verdict.profile
        self.step_bytes, self.skipped = verdict.step_bytes, verdict.skipped
        run, path = verdict.run, self._terms.history
        keep = None if run is None or path is None else partial(keep_measured, run, path)
        self._comparison = Comparison(self.model, verdict, self.config, keep)
