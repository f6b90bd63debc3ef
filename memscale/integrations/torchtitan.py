"""A plan of memscale as an activation checkpointing policy of torchtitan."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from memscale.algebra import Plan
from memscale.config import Config as WrapConfig
from memscale.core import RuntimeUnavailable
from memscale.legacy import wrapped
from memscale.transforms import checkpoint

try:
    from torchtitan.distributed.activation_checkpoint import ActivationCheckpointing
except ImportError as error:
    raise RuntimeUnavailable(
        f"memscale.integrations.torchtitan needs torchtitan ({error}); install it as its own documentation says"
    ) from error


class MemScaleAC(ActivationCheckpointing):  # type: ignore[misc]  # torchtitan is not in every environment
    """An activation checkpointing policy that puts the model under a plan, in place.

    torchtitan builds the policy from its config and applies it after tensor parallelism, before ``torch.compile`` of
    the blocks and before FSDP, on the meta device. No module is replaced, so names in checkpoints stay the same.
    `memscale.detach` removes the plan.

    In a Trainer's config: ``activation_checkpoint=MemScaleAC.Config(plan="plan.json")``. Without a plan every child of
    ``layers`` is under `checkpoint`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(ActivationCheckpointing.Config):  # type: ignore[misc]
        """The policy's config: `plan` is the path of a file that `Plan.to_json` wrote, for this model.

        The fields ``preserve_rng_state`` and ``determinism_check`` have no effect: recomputes always have the random
        states of the forward, and always check their inputs.
        """

        plan: str | None = None

    def apply(self, model: nn.Module) -> None:
        """Applies the plan to `model` in place.

        Raises:
            PlanError: the plan's file cannot be read or holds no plan, or the plan names modules that the model lacks.
        """
        path = self.config.plan
        plan = Plan({"layers.*": checkpoint()}) if path is None else Plan.load(path)
        wrapped(model, WrapConfig(), sample_input=None, plan=plan)
