"""Shortens a plan: one rule with a pattern in place of rules for all modules that the pattern matches."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator

from torch import nn

from memscale.algebra import Plan, Transform, find_regions
from memscale.core import matches, written

_NUMBER = re.compile(r"\d+")
# Numbers of a path that may become stars; each doubles the number of patterns. By choice.
_MOST_NUMBERS = 6


def with_globs(plan: Plan, model: nn.Module) -> Plan:
    """Returns `plan` with fewer rules: the same transforms on the same modules of `model`, by patterns.

    >>> import torch, memscale as ms
    >>> model = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(3)])
    >>> with_globs(ms.Plan({str(at): ms.checkpoint() for at in range(3)}), model)
    Plan({'*': checkpoint()})
    >>> with_globs(ms.Plan({str(at): ms.checkpoint() for at in range(2)}), model)
    Plan({'0': checkpoint(), '1': checkpoint()})

    Args:
        plan: the plan, with rules for single paths.
        model: the model that the plan is for.
    """
    if stepping := plan.of_optimizers():
        both = [*with_globs(plan.of_functions(), model), *stepping]
        return Plan([(rule.pattern, rule.transform) for rule in both])
    by_path = {rule.pattern: rule.transform for rule in plan}
    paths = [path for path, _ in model.named_modules(remove_duplicate=False)]
    rules: dict[str, Transform] = {}
    covered: set[str] = set()
    for path, how in by_path.items():
        if path in covered:
            continue
        for pattern in _patterns(written(path)):
            found = [each for each in paths if matches(pattern, each)]
            if all(by_path.get(each) == how for each in found) and covered.isdisjoint(found):
                rules[pattern] = how
                covered.update(found)
                break
    found_plan = Plan(rules)
    # A plan with two rules for one path, or for a module with several paths, may change its meaning: it is returned
    # unchanged then.
    return found_plan if _meaning(found_plan, model) == _meaning(plan, model) else plan


def _patterns(path: str) -> Iterator[str]:
    """Yields `path` with stars for some of its numbers: more stars first, and of as many stars the innermost first."""
    pieces, numbers = _NUMBER.split(path), _NUMBER.findall(path)
    kept = min(len(numbers), _MOST_NUMBERS)
    for stars in sorted(
        itertools.product((True, False), repeat=kept), key=lambda it: (sum(it), it[::-1]), reverse=True
    ):
        chosen = ["*" if star else number for star, number in zip(stars, numbers, strict=False)] + numbers[kept:]
        yield "".join(itertools.chain.from_iterable(itertools.zip_longest(pieces, chosen, fillvalue="")))


def _meaning(plan: Plan, model: nn.Module) -> dict[int, Transform]:
    return {id(module): how for module, how in find_regions(model, plan)}
