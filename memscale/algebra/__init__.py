"""Transforms and their compositions, modules as functions, plans, and `transform`, which applies a plan to a model."""

from memscale.algebra.apply import PlanLike, find_regions, install, transform, uninstall
from memscale.algebra.composition import Numbers, Transform, chain, compose, identity
from memscale.algebra.functions import copy_tree, functional, walk
from memscale.algebra.of_optimizers import rules_by_parameter, trains
from memscale.algebra.plan import Plan, as_plan
from memscale.algebra.region import (
    ForwardPatch,
    Method,
    OfModule,
    OwnForward,
    Placing,
    Transformed,
    attach,
    is_transformed,
    placing_in,
)
