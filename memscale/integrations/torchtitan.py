"""torchtitan: a plan of memscale as an activation checkpointing policy of its trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from memscale.algebra import Plan
from memscale.config import Config as WrapConfig
from memscale.core import ConfigError, RuntimeUnavailable
from memscale.legacy import wrapped
from memscale.transforms import checkpoint

try:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
except ImportError as error:
    raise RuntimeUnavailable(
        f"memscale.integrations.torchtitan needs torchtitan ({error}); install it as its own documentation says"
    ) from error


class MemScaleAC(ActivationCheckpointing):  # type: ignore[misc]  # torchtitan is not in every environment
    """An activation checkpointing policy: the model trains under a plan, in place.

    torchtitan builds the policy from its config and applies it after tensor parallelism, before ``torch.compile`` of
    the blocks and before FSDP, on the meta device. No module is replaced, so that names in checkpoints stay those of
    the model; `memscale.detach` takes it off.

    In a Trainer's config: ``activation_checkpoint=MemScaleAC.Config(plan="plan.json")``. Without a plan every child of
    ``layers`` is under `checkpoint`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """The policy's config: `plan` is the path of a file that `Plan.to_json` wrote, for this model.

        Recomputes have the random states of the forward whatever ``preserve_rng_state`` says, and what they read is
        checked whatever ``determinism_check`` says.
        """

        plan: str | None = None

    def apply(self, model: nn.Module) -> None:
        """Put the plan's regions on `model`.

        Raises:
            ConfigError: the plan's file cannot be read.
            PlanError: it is no plan, or names what the model has not.
        """
        path = self.config.plan
        if path is None:
            plan = Plan({"layers.*": checkpoint()})
        else:
            try:
                plan = Plan.from_json(Path(path).read_text(encoding="utf-8"))
            except OSError as error:
                raise ConfigError(
                    f"MemScaleAC.Config(plan={path!r}) cannot be read ({error.strerror}); give the path of a file that "
                    "Plan.to_json() wrote"
                ) from error
        wrapped(model, WrapConfig(), sample_input=None, plan=plan)
