"""`Executor`: the plans of one wrapped model: installs them, makes new ones for larger batches, and undoes all."""

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
#: The reports of models that were wrapped and detached, for `report`.
DETACHED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

# Attributes that `_begin` sets anew in a copy of the executor.
_OF_PROCESS = {
    *("_lock", "_planning", "_own", "_optimizing"),
    *("_verdict", "_headline", "_comparison", "_server"),
}


class Executor:
    """What `wrap` did to a model; ``str`` of it is a readable report, including what was moved so far.

    It plans at the first call of a training loop if it was given no batch, and again, between two steps, when a larger
    batch comes; see `docs/wrap.md`. It holds the model weakly: after the model is gone only the report works. A deep
    copy or a pickle of a wrapped model carries an executor of its own, without the profile, which detaches the copy; a
    deep copy shares the runtime, a pickle makes one with the same settings.

    >>> import torch, memscale as ms
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    >>> model = torch.nn.Sequential(*blocks)
    >>> config = ms.Config(force_optimize=True, enable_logging=False)
    >>> ms.wrap(model, config)._memscale_executor.plan
    Plan({'*': checkpoint()})
    >>> ms.detach(model)

    Args:
        model: the model to change.
        terms: the settings of `wrap`.
        verdict: the first verdict.
        optimizer: the optimizer that trains the model, or None if unknown.
        batch: the batch for which `verdict` was made, or None.

    Attributes:
        plan: the plan in force.
        config: the config.
        hardware: the device for which the plan was made.
        profile: the profile of the untransformed step; None until a batch is known, and after a failed simulation.
        step_bytes: the bytes of that step; without a profile, the bytes that stay on the device between steps.
        skipped: why the plan is empty, or None if it is not.
        runtime: the runtime of the plan's ``offload()``; None if nothing is offloaded, and after `detach`.
    """

    def __init__(
        self,
        model: nn.Module,
        terms: Terms,
        verdict: Verdict,
        optimizer: torch.optim.Optimizer | None,
        batch: Any,
    ) -> None:
        # Weak: the executor is an attribute of the model, and a cycle would keep the model's weights alive.
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self.config, self._terms = terms.config, terms
        self._caching: list[Any] = []
        self._patches: list[ForwardPatch] = []
        self._wrapped: list[ForwardPatch] = []  # of the previous plan, still called by someone else's forward
        self._seen: dict[str, Seen] = {}  # the regions, by path
        self._root = None if verdict.for_all else SeenRoot(self.before_direct_call)
        self._hook: Any = None  # a forward pre-hook, which runs before patches that others made to the forward
        self._announced = False  # whether `_hook` ran for the call that reaches the forward next
        self._looked = False  # whether a step has shown which regions run
        self._plans = PlansByShapes()
        self.runtime: Runtime | None = None
        self._moving = terms.runtime  # the one runtime of all plans that move tensors
        self._begin(optimizer)
        self._take(verdict, None if batch is None else shapes_of(batch))

    def _begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Sets the attributes that belong to this model in this process, and not to its copies."""
        self._lock = threading.RLock()
        self._planning: int | None = None  # the id of the thread that is planning
        # Optimizers known to have parameters of the model: finding out takes 1 ms per step for 1,000 parameters.
        self._own: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._optimizing = Optimizing(self.config, optimizer)
        self._verdict: Verdict | None = None
        self._headline: str | None = None  # the last line that was printed
        self._comparison: Comparison | None = None
        self._server: Server | None = None

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}
        return {**state, "_model": self.model, "profile": None, "_plans": PlansByShapes(present=self._plans.present)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._model = weakref.ref(state["_model"])
        self._begin(None)

    # -- properties and reports ----------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The model.

        Raises:
            TransformError: the model is gone; an executor does not keep it alive.
        """
        model = self._model()
        if model is None:
            raise TransformError("the model of this executor is gone; keep the model as long as you need its executor")
        return model

    @property
    def hardware(self) -> Hardware:
        """The model's device when the plan was made."""
        return self._terms.hardware

    @property
    def is_attached(self) -> bool:
        """Whether the model exists and is wrapped by this executor."""
        model = self._model()
        return model is not None and model.__dict__.get(ATTRIBUTE) is self

    @property
    def predicted(self) -> dict[str, int]:
        """The predicted peak of a step in bytes: ``"allocated"``, and on CUDA also ``"reserved"`` by the allocator."""
        if isinstance(self.plan, ProvenPlan):
            planned = self.plan.evidence.planned
            on_cuda = self.hardware.device_type == "cuda"
            return {"allocated": planned.peak_bytes, **({"reserved": planned.taken_bytes} if on_cuda else {})}
        return {} if self.profile is None or self.plan else {"allocated": self.step_bytes}

    @property
    def predicted_bytes(self) -> int | None:
        """The predicted peak of a step in bytes, or None."""
        return self.predicted.get("allocated")

    @property
    def peak_error(self) -> float | None:
        """The error of the predicted peak as a share of the real one; None until measured."""
        return None if self._comparison is None else self._comparison.peak_error

    @property
    def device(self) -> torch.device:
        """The device of the model's first parameter; the CPU if it has none."""
        return next((parameter.device for parameter in self.model.parameters()), torch.device("cpu"))

    @property
    def regions(self) -> tuple[str, ...]:
        """The paths of the plan's regions."""
        return tuple(self._seen)

    @property
    def regions_that_ran(self) -> tuple[str, ...]:
        """The paths of the plan's regions that have run since the plan was made."""
        return tuple(path for path, seen in self._seen.items() if seen.ran)

    @property
    def metrics_url(self) -> str | None:
        """The address of the live figures, or None if ``config.observability_port`` is not set or the port is taken."""
        return None if self._server is None else self._server.url

    def as_log(self) -> dict[str, float]:
        """Returns figures about memory now, in GiB, for a training log such as ``wandb.log``.

        >>> import torch, memscale as ms
        >>> model = ms.wrap(torch.nn.Linear(2, 2), ms.Config(enable_logging=False), torch.ones(1, 2))
        >>> sorted(model._memscale_executor.as_log())
        ['memory/predicted_gib']
        """
        return memory_keys(self)

    def step_text(self) -> str:
        """Returns one line about the memory of the untransformed step."""
        if self.profile is None:
            return f"step without memscale: {format_bytes(self.step_bytes)} and activations, which are not known"
        return f"step without memscale: {format_bytes(self.step_bytes)} at its peak, {self.profile.moment}"

    def idle_text(self) -> str | None:
        """Returns which parts of the plan have not run although the model trains, or None if all have."""
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
        """Logs `message` if the config allows it."""
        say(self.config, message)

    def report(self) -> None:
        """Logs what is in force, and prints a line if it differs from the last printed one."""
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
        """Serves live figures if the config asks for it."""
        if self.config.observability_port is not None and self._server is None:
            self._server = serve(Metrics(self), self.config.observability_port)
            if self._server is not None:
                weakref.finalize(self, self._server.close)
                self.say(f"live figures at {self._server.url}")

    # -- attach, install, detach ---------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Registers the executor on the model and turns Hugging Face caches off."""
        model = self.model
        model.__dict__[ATTRIBUTE] = self
        self._caching = caches_off(model, self.config)
        if self._root is not None:
            self._hook = model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True)

    def install(self) -> None:
        """Installs the plan's regions on the model."""
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
        """Puts the plan's optimizer rules on the optimizer that trains the model, if it is known."""
        self._optimizing.follow(self.model, self.plan, self.runtime)

    def uninstall(self) -> list[tuple[str, Callable[..., Any]]]:
        """Removes the plan's regions, but not what `attach` did; returns others' forwards that stay, by path."""
        model = self.model
        paths = {module: path for path, module in model.named_modules()}
        left = [(patch, paths.get(patch.module, ""), on_top) for patch, on_top in uninstall(self._patches)]
        # Someone else's forward that calls a patched one stays around the regions of the next plan too. The root's
        # patch always does: PyTorch reads the root's forward before it runs the hook that plans.
        self._wrapped = [patch for patch, path, _ in left if self._has_run(path)]
        self._wrapped += [patch for patch in self._patches if patch.module is model]
        self._patches = []
        let_checkpointing(model)
        return [(path, on_top) for _, path, on_top in left]

    def detach(self) -> None:
        """Undoes everything; a second call does nothing.

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
            # A forward that was seen to call the region is a wrapper around it, so its replacement changes nothing.
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

    # -- plans for later batches ---------------------------------------------------------------------------------------

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """A forward pre-hook, so that planning precedes wrappers around the forward, such as autocast's."""
        if torch.compiler.is_compiling() or model is not self._model():
            return
        if self._planning not in (None, threading.get_ident()):
            with self._lock:  # waits until the other thread has installed the regions again
                pass
        if torch.is_grad_enabled() and self._planning is None:
            self.before_call(args, kwargs)
            self._announced = True

    def before_direct_call(self, args: Any, kwargs: Any) -> None:
        """Called inside the forward, for callers of `model.forward(x)`, which bypasses the model's hooks."""
        if not self._announced and isinstance(self.model.__dict__["forward"], Method):  # without a wrapper around it
            self.before_call(args, kwargs)
        self._announced = False

    def before_call(self, args: Any, kwargs: Any) -> None:
        """Called with the arguments of each call of the model with gradients; plans if no plan serves their shapes."""
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
        """Called after each step of any optimizer; for this model's, the next call may use another plan."""
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
        """Switches to a plan for `shapes`: an existing one, or a new one."""
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
        """Returns the verdict for a call, and the shapes for which it was made."""
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
        """Puts `verdict`, made for a batch of `shapes`, in force."""
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
