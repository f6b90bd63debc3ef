"""`Executor`: holds a wrapped model: installs its plan, makes another plan where one is due, and undoes all."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import weakref
from typing import Any

import torch
from torch import nn

from memscale.algebra import Plan
from memscale.config import Config
from memscale.core import ConfigError, TransformError, format_bytes, in_process_group, shown, wrapped
from memscale.hardware import Hardware
from memscale.inspection import check_same_numbers
from memscale.legacy.comparison import StepComparison
from memscale.legacy.decide import Verdict, decide, trained_bytes
from memscale.legacy.huggingface import caches_off, caches_on
from memscale.legacy.installation import Installation
from memscale.legacy.log import LOG, announce, say
from memscale.legacy.optimizing import Optimizing
from memscale.legacy.plans_by_shapes import PlansByShapes, Shapes, as_batch, shapes_of, with_shapes
from memscale.legacy.summary import headline, moved_text, planned_text, step_text
from memscale.legacy.terms import Terms, hardware_of
from memscale.legacy.training_loop import LoopWatch, is_a_step_of_its_own, leave, listen
from memscale.observability import Metrics, Server, memory_keys, serve
from memscale.planning import ProvenPlan
from memscale.runtime import Runtime
from memscale.simulation import Loop, Profile

ATTRIBUTE = "_memscale_executor"
#: The reports of models that were wrapped and detached, for `report`.
DETACHED: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()

# Attributes that `_begin` sets anew in a copy of the executor.
_OF_PROCESS = {"_optimizing", "_headline", "_comparison", "_server", "_lock", "_planning_thread", "_watch", "_call"}


class Executor:
    """The effect of `wrap` on a model; prints as a report that includes the bytes moved so far.

    It plans at the first call of a training loop if it was given no batch, and again, between two steps, when a larger
    batch comes; see `docs/wrap.md`. It holds the model weakly: after the model is gone only the report works. A deep
    copy or a pickle of a wrapped model carries an executor of its own, without the profile, which detaches the copy; a
    deep copy shares the runtime, a pickle makes one with the same settings.

    >>> import torch, memscale as ms
    >>> blocks = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(2)]
    >>> model = torch.nn.Sequential(*blocks)
    >>> config = ms.Config(force_optimize=True, enable_logging=False)
    >>> ms.Executor.of(ms.wrap(model, config)).plan
    Plan({'*': checkpoint()})
    >>> ms.detach(model)

    Args:
        model: the model to change.
        terms: the settings of `wrap`.
        verdict: the first verdict.
        optimizer: the optimizer that trains the model, or None if unknown.
        batch: the batch for which `verdict` was made, or None.
    """

    @classmethod
    def of(cls, model: nn.Module) -> Executor | None:
        """Returns the executor of a wrapped model, or None for any other model.

        >>> import torch
        >>> print(Executor.of(torch.nn.Linear(2, 2)))
        None

        Raises:
            ConfigError: `model` is no module.
        """
        if not isinstance(model, nn.Module):
            raise ConfigError(f"Executor.of({shown(model)}) takes a model; pass the model that wrap() returned")
        executor = model.__dict__.get(ATTRIBUTE)
        # A copy that `transform` made of a wrapped model has the attribute too, but the executor of the original.
        return executor if isinstance(executor, cls) and executor._model() is model else None

    def __init__(
        self, model: nn.Module, terms: Terms, verdict: Verdict, optimizer: torch.optim.Optimizer | None, batch: Any
    ) -> None:
        # Weak: the executor is an attribute of the model, and a cycle would keep the model's weights alive.
        self._model = weakref.ref(model)
        self._kind = type(model).__name__
        self._terms = terms
        self._caching: list[Any] = []
        self._plans = PlansByShapes()
        self._follows = not verdict.for_all
        self._hooks: list[Any] = []  # of the forward: before it, a call asks for a plan
        self._installation = Installation(self._follows)
        self._begin(optimizer)
        self._take(verdict, None if batch is None else shapes_of(batch))

    def _begin(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Sets the attributes that belong to this model in this process, and not to its copies."""
        self._optimizing = Optimizing(self.config, optimizer)
        self._headline: str | None = None  # the last line that was printed
        self._comparison: StepComparison | None = None
        self._server: Server | None = None
        self._watch = LoopWatch()
        # Of the call that runs: the exception handled around it, whether it is between two steps, and whether watched.
        self._call: tuple[BaseException | None, bool, bool] | None = None
        self._lock = threading.RLock()  # held while a plan is made and installed
        self._planning_thread: int | None = None  # the id of the thread that plans, whose own calls ask for no plan

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in _OF_PROCESS}
        verdict = dataclasses.replace(self._verdict, profile=None, run=None)
        return {
            **state,
            "_model": self.model,
            "_verdict": verdict,
            "_plans": PlansByShapes(present=self._plans.present),
        }

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
    def plan(self) -> Plan:
        """The plan in force."""
        return self._verdict.plan

    @property
    def profile(self) -> Profile | None:
        """The profile of the untransformed step; None until a batch is known, and after a failed simulation."""
        return self._verdict.profile

    @property
    def step_bytes(self) -> int:
        """The bytes of that step; without a profile, the bytes that stay on the device between steps."""
        return self._verdict.step_bytes

    @property
    def skipped(self) -> str | None:
        """Why the plan is empty, or None if it is not."""
        return self._verdict.skipped

    @property
    def runtime(self) -> Runtime | None:
        """The runtime of the plan's ``offload()``; None if nothing is offloaded, and after `detach`."""
        return self._terms.runtime if any(rule.transform.moves for rule in self.plan) else None

    @property
    def config(self) -> Config:
        """The config."""
        return self._terms.config

    @property
    def hardware(self) -> Hardware:
        """The model's device when the plan was made."""
        return self._terms.hardware

    @property
    def is_attached(self) -> bool:
        """Whether the model exists and is wrapped by this executor."""
        model = self._model()
        return model is not None and Executor.of(model) is self

    @property
    def predicted(self) -> dict[str, int]:
        """The predicted peak of a step in bytes: ``"allocated"``, and on CUDA also ``"reserved"`` by the allocator."""
        unchanged = None if self.plan else self.profile
        step = self.plan.evidence.planned if isinstance(self.plan, ProvenPlan) else unchanged
        if step is None:
            return {}
        on_cuda = self.hardware.device_type == "cuda"
        return {"allocated": step.peak_bytes, **({"reserved": step.taken_bytes} if on_cuda else {})}

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
        return tuple(self._installation.seen)

    @property
    def regions_that_ran(self) -> tuple[str, ...]:
        """The paths of the plan's regions that have run since the plan was made."""
        return tuple(path for path, seen in self._installation.seen.items() if seen.ran)

    @property
    def metrics_url(self) -> str | None:
        """The address of the live figures, or None if ``config.observability_port`` is not set or the port is taken."""
        return None if self._server is None else self._server.url

    def as_log(self) -> dict[str, float]:
        """Returns figures about memory now, in GiB, for a training log such as ``wandb.log``.

        >>> import torch, memscale as ms
        >>> model = ms.wrap(torch.nn.Linear(2, 2), ms.Config(enable_logging=False), torch.ones(1, 2))
        >>> sorted(ms.Executor.of(model).as_log())
        ['memory/predicted_gib']
        """
        return memory_keys(self)

    def step_text(self) -> str:
        """Returns one line about the memory of the untransformed step."""
        return step_text(self._verdict)

    def __repr__(self) -> str:
        return f"Executor({self._kind}, {self.plan!r})"

    def __str__(self) -> str:
        lines = [f"{self._kind} on {self.hardware}", wrapped(self.step_text())]
        lines += planned_text(self._verdict, self.config)
        if isinstance(self.plan, ProvenPlan) and self.plan.decision.decision_source != "user_config":
            lines.append(f"policy: {self.plan.decision}")
        lines.append(str(self.plan) if self.skipped is None else wrapped(f"unchanged: {self.skipped}"))
        if self._watch.steps:
            lines += self._findings()
        lines += self._optimizing.text()
        if self._comparison is not None and self._comparison.text:
            lines.append(wrapped(self._comparison.text))
        if self.runtime is not None:
            lines.append(moved_text(self.runtime))
        return "\n".join(lines)

    def _findings(self) -> list[str]:
        """Returns what the steps so far showed: parts of the plan that did not run, and calls that share a backward."""
        if self._waits:
            idle: str | None = (
                f"wrap() saw no call of this {self._kind} in a training step, so that nothing was planned; "
                "call the model itself and not its forward, wrap the module that the loop calls, or pass "
                "sample_input=..."
            )
        else:
            idle = self._installation.idle(self._kind, self.plan)
        return [text for text in (idle, self._watch.text(self._kind)) if text is not None]

    @property
    def _waits(self) -> bool:
        """Whether the first plan waits for a batch, because what is known without one does not decide."""
        decides = self.skipped is not None and self._verdict.limit_bytes is None
        return self._follows and self._plans.is_new and not decides

    def say(self, message: str) -> None:
        """Logs `message` if the config allows it."""
        say(self.config, message)

    def report(self) -> None:
        """Logs the text of ``str(executor)``, and prints a line if it differs from the last printed one.

        The first training call of a model without a `sample_input` plans, so before that call no line is printed.
        """
        if self._waits:
            state = "stays unchanged" if self.skipped is not None else f"runs under {self.plan!r}"
            self.say(f"{self._kind} {state} until its first training call, which plans for its batch")
            return
        line = headline(self.model, self._verdict, self._installation.seen)
        if line not in (None, self._headline):
            announce(self.config, str(line))
            self._headline = line
        self.say(str(self))

    # -- attach, install, detach ---------------------------------------------------------------------------------------

    def attach(self, batch: Any) -> None:
        """Wraps the model, and verifies its numbers on `batch` if the config asks for it.

        Raises:
            CorrectnessError: a number differs; the model is left unwrapped, as after any error.
        """
        model = self.model
        model.__dict__[ATTRIBUTE] = self
        try:
            self._caching = caches_off(model, self.config)
            if self._follows:
                self._hooks = [
                    model.register_forward_pre_hook(self.before_forward, prepend=True, with_kwargs=True),
                    model.register_forward_hook(self.after_forward, always_call=True),
                ]
            if self.config.verify_correctness and self.skipped is None:
                check_same_numbers(model, self._install, self._uninstall, batch)
            else:
                self._install()
            self._install_optimizer()
        except BaseException:
            self.detach()
            raise
        self.report()
        if self.config.observability_port is not None:
            self._server = serve(Metrics(self), self.config.observability_port)
        if self._server is not None:
            weakref.finalize(self, self._server.close)
            self.say(f"live figures at {self._server.url}")

    def _install(self) -> None:
        """Installs the plan's regions on the model."""
        self._installation.put_on(self.model, self.plan, self.runtime, self.config)
        listen(self)

    def _install_optimizer(self) -> None:
        """Puts the plan's optimizer rules on the optimizer that trains the model, if it is known."""
        self._optimizing.follow(self.model, self.plan, self.runtime)

    def _uninstall(self) -> None:
        """Removes the plan's regions, but not what `attach` did."""
        self._installation.take_off(self.model)

    def detach(self) -> None:
        """Undoes everything; a second call does nothing.

        Raises:
            TransformError: the model is gone.

        >>> import torch, memscale as ms
        >>> model = torch.nn.Linear(2, 2)
        >>> before = dict(model.__dict__)
        >>> ms.Executor.of(ms.wrap(model)).detach()
        >>> model.__dict__ == before
        True
        """
        with self._lock:
            if Executor.of(self.model) is self:
                text = str(self)
                self._detach(self.model)
                DETACHED[self.model] = text

    def _detach(self, model: nn.Module) -> None:
        for path, on_top in self._installation.take_off(model):
            # A forward that was seen to call the region is a wrapper around it, so its replacement changes nothing.
            LOG.log(
                logging.INFO if self._installation.has_run(path) else logging.WARNING,
                "the forward of %s was replaced by %s.%s after wrap(); the replacement stays, around the original",
                repr(path) if path else f"the {self._kind}",
                on_top.__module__,
                getattr(on_top, "__qualname__", type(on_top).__qualname__),
            )
        self._installation = Installation(follows=False)
        self._optimizing.release()
        leave(self)
        for hook in self._hooks:
            hook.remove()
        self._plans.known.clear()
        if self._server is not None:
            self._server.close()
        self._server = None
        caches_on(model, self._caching)
        del model.__dict__[ATTRIBUTE]
        moved = "" if self.runtime is None else f"; {moved_text(self.runtime)}"
        self._terms = dataclasses.replace(self._terms, runtime=None)
        self.say(f"detached {self._kind}{moved}")

    # -- steps, and plans for later batches ----------------------------------------------------------------------------

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Called after each step of any optimizer; for this model's, the next call may use another plan."""
        model = self._model()
        if model is None or not self._optimizing.trains(model, optimizer):
            return
        self._plans.between_steps = self._installation.had_step = True
        self._optimizing.stepped(model, optimizer)
        if self._server is not None:
            self._server.metrics.after_step()
        if not self._watch.steps:
            for text in self._findings():
                LOG.warning("%s", text)
        self._watch.after_step()
        self.trained_by(optimizer)
        if self._comparison is not None and self._comparison.after_step(model, optimizer, self._optimizing.own):
            self._plan_beyond(self._comparison.peak_bytes)

    def before_forward(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """The forward pre-hook: switches to a plan for this call if one is due, an existing plan or a new one.

        A hook precedes wrappers around the forward, such as autocast's.
        """
        if torch.compiler.is_compiling() or model is not self._model():
            return
        if self._planning_thread not in (None, threading.get_ident()):
            with self._lock:  # waits until the other thread has installed the regions again
                pass
        if not torch.is_grad_enabled() or self._planning_thread is not None:
            return
        watches = self._watch.watches and is_a_step_of_its_own(model)
        if watches:
            self._watch.called(model)
        if self._plans.between_steps:
            if self._watch.finds_gradients and self._terms.loop.accumulate == 1:
                self._plan_again(
                    f"gradients are in memory as {self._kind} is called, so it is planned again for accumulate=2; "
                    "zero_grad() before that call, if no pass accumulates, takes less memory",
                    loop=dataclasses.replace(self._terms.loop, accumulate=2),
                )
            if self._had_frozen and trained_bytes(model) > self._trained_bytes:  # as after a warm-up of the head
                self._plan_again()
        shapes = shapes_of((args, kwargs))
        if not self._plans.serves(shapes):
            if not is_a_step_of_its_own(model):
                return
            with self._lock:
                self._follow(args, kwargs, shapes)
        self._call = sys.exc_info()[1], self._plans.between_steps, watches
        self._plans.between_steps = False

    def after_forward(self, model: nn.Module, args: Any, output: Any) -> None:
        """The forward hook: a forward that raised keeps nothing for a backward, so that its call begins no step."""
        if torch.compiler.is_compiling() or model is not self._model() or self._call is None:
            return
        (handled, between_steps, watched), self._call = self._call, None
        if output is None and sys.exc_info()[1] is not handled:
            self._plans.between_steps |= between_steps
            if watched:
                self._watch.raised()
            if self._verdict.profile is None:
                self._plans.drop()

    def trained_by(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes later plans for `optimizer`, which the loop steps, if the caller gave none and it is unlike AdamW."""
        if not in_process_group() and self._optimizing.meets(self.model, optimizer):
            self.say(f"{type(optimizer).__name__} steps this {self._kind}: plans are made for it from now on")
            self._plan_again()

    def follow(self, loop: Loop) -> None:
        """Makes this plan and later ones for `loop`."""
        if loop != self._terms.loop:
            self._plan_again(loop=loop)

    def _plan_again(self, why: str = "", **terms: Any) -> None:
        """Makes the next plan, which is due before the next step, and later ones under other terms."""
        self._terms = dataclasses.replace(self._terms, **terms)
        self._plans.forget()
        if why:
            announce(self.config, why)

    def _plan_beyond(self, peak_bytes: int | None) -> None:
        """Makes later plans for less, once, if a step that was predicted to fit was measured to exceed the limit."""
        limit, said = self._terms.limit
        predicted = self.predicted
        if peak_bytes is None or not predicted or self._terms.unseen_bytes or not self._follows or in_process_group():
            return
        unseen, taken = peak_bytes - predicted["allocated"], max(predicted.values())
        if taken <= limit < taken + unseen:
            self._plan_again(
                f"the step took {format_bytes(unseen)} more than predicted, for which {said} leaves no room: it is "
                "planned again for that much less",
                unseen_bytes=unseen,
            )

    def _follow(self, args: Any, kwargs: Any, shapes: Shapes) -> None:
        """Puts the plan for a call with `shapes` in force, if it is another one than the present."""
        if not self.is_attached or (wanted := self._plans.due(shapes)) is None:
            return
        self._uninstall()
        self._planning_thread = threading.get_ident()
        try:
            self._take(*(self._plans.find(wanted) or self._planned(args, kwargs, wanted)))
        finally:
            self._planning_thread = None
            self._install()
            self._install_optimizer()
        self.report()

    def _planned(self, args: Any, kwargs: Any, shapes: Shapes) -> tuple[Verdict, Shapes]:
        """Returns the verdict for a call, and the shapes for which it was made."""
        batch = as_batch(args, kwargs)
        self._terms = dataclasses.replace(self._terms, hardware=hardware_of(self.model))
        # Planned for the shapes of the call alone where no plan fits, or no simulation takes, the widened ones.
        for wanted in dict.fromkeys([self._plans.widened(shapes), shapes]):
            self.say(f"planning for a batch of shapes {', '.join(map(str, wanted))}")
            verdict = decide(self.model, with_shapes(batch, wanted), self._optimizing.plain(self.model), self._terms)
            self._plans.rounds_up = self._plans.rounds_up and verdict.profile is not None
            if verdict.profile is not None and verdict.refusal is None:
                break
        return verdict, wanted

    def _take(self, verdict: Verdict, shapes: Shapes | None) -> None:
        """Puts `verdict`, made for a batch of `shapes`, in force."""
        self._verdict, self._trained_bytes = verdict, trained_bytes(self.model)
        # Only then are the bytes compared before each step: to add them up takes 1 ms for 500 parameters.
        self._had_frozen = not all(parameter.requires_grad for parameter in self.model.parameters())
        if verdict.refusal is not None and shapes not in self._plans.known:
            LOG.warning("%s", verdict.refusal)
        self._plans.take(verdict, shapes)
        self._comparison = StepComparison(self.model, verdict, self._terms)
