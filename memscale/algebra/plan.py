"""`Plan`: a mapping from module paths to transforms, as data. A plan refers to no tensors and to no model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

from memscale.algebra.composition import Transform, chain, is_of_optimizers, what_to_write
from memscale.core import (
    Document,
    PlanError,
    first_line,
    from_data,
    in_runs,
    matches,
    misfit,
    row_label,
    shown,
    spellings,
    table_lines,
)

_Plan = TypeVar("_Plan", bound="Plan")

_DOCUMENT = Document("plan", version=1, writer="Plan.to_json()", error=PlanError)


@dataclasses.dataclass(frozen=True)
class Rule:
    """A line of a plan: `transform` for every module whose path matches `pattern`."""

    pattern: str
    transform: Transform

    def matches(self, path: str) -> bool:
        """Whether the module path `path` matches: ``*`` is one segment, ``**`` any number, ``""`` the root."""
        return matches(self.pattern, path)


class Plan:
    """Rules from module paths to transforms: immutable, comparable, hashable, printable and serialisable.

    >>> import memscale as ms
    >>> plan = ms.Plan({"layers.*": ms.checkpoint()})
    >>> plan
    Plan({'layers.*': checkpoint()})
    >>> plan == ms.Plan.from_json(plan.to_json())
    True
    >>> print(plan)
    path      numbers  transform
    layers.*  exact    checkpoint()

    Args:
        rules: a mapping from path patterns to transforms, or an iterable of such pairs when one pattern is to occur
            twice. Where several rules match one path, a later rule composes outside an earlier one.

    Raises:
        PlanError: a pattern is not a path pattern, or a value is not a transform; all of them at once.
    """

    __slots__ = ("rules",)

    rules: tuple[Rule, ...]

    def __init__(self, rules: Mapping[str, Transform] | Iterable[tuple[str, Transform]] = ()) -> None:
        try:
            pairs = list(rules.items() if isinstance(rules, Mapping) else [(key, value) for key, value in rules])
        except (TypeError, ValueError) as error:
            raise PlanError(
                f"Plan(rules) takes a mapping from path patterns to transforms, such as "
                f"{{'layers.*': checkpoint()}}, or pairs of the two; got {rules!r}"
            ) from error
        wrong = [message for pattern, value in pairs if (message := _misfit(pattern, value))]
        if wrong:
            raise PlanError("; ".join(wrong))
        object.__setattr__(self, "rules", tuple(Rule(pattern, value) for pattern, value in pairs))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Plan is immutable; make a new one instead of setting {name!r}")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Plan is immutable; make a new one instead of deleting {name!r}")

    def __eq__(self, other: object) -> bool:
        return self.rules == other.rules if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.rules)

    def __len__(self) -> int:
        return len(self.rules)

    def __iter__(self) -> Iterator[Rule]:
        return iter(self.rules)

    def __reduce__(self) -> Any:
        return (Plan, ([(rule.pattern, rule.transform) for rule in self.rules],))

    def __repr__(self) -> str:
        patterns = [rule.pattern for rule in self.rules]
        if not patterns:
            return "Plan()"
        if len(set(patterns)) == len(patterns):
            return f"Plan({{{', '.join(f'{r.pattern!r}: {r.transform!r}' for r in self.rules)}}})"
        return f"Plan([{', '.join(f'({r.pattern!r}, {r.transform!r})' for r in self.rules)}])"

    def __str__(self) -> str:
        rows = [("path", "numbers", "transform")]
        for run in in_runs(self.rules, lambda rule: rule.pattern or "(root)", lambda rule: rule.transform):
            name = row_label([rule.pattern or "(root)" for rule in run])
            rows.append((name, run[0].transform.numbers, repr(run[0].transform)))
        if not self.rules:
            rows.append(("(none)", "exact", "identity"))
        return "\n".join(table_lines(rows, "<<<"))

    def explain(self, path: str | None = None) -> str:
        """Returns the plan as a table, and what each of its transforms does. A plan from `memscale.plan` adds figures.

        >>> import memscale as ms
        >>> print(ms.Plan({"layers.*": ms.checkpoint()}).explain())
        path      numbers  transform
        layers.*  exact    checkpoint()
        checkpoint: A transform that keeps a function's inputs for backward and recomputes the rest.

        Args:
            path: the path of a module, to show only the rules that match it; `None` shows all rules.
        """
        rules = Plan([(rule.pattern, rule.transform) for rule in self if path is None or rule.matches(path)])
        names = dict.fromkeys(each.spelling for rule in rules for each in chain(rule.transform))
        return "\n".join([str(rules), *(f"{name}: {first_line(name)}" for name in names)])

    def diff(self, other: Plan) -> str:
        """Returns the differences from this plan to `other`, one line per path pattern; empty if there are none.

        >>> import memscale as ms
        >>> print(ms.Plan({"layers.*": ms.checkpoint()}).diff(ms.Plan({"layers.*": ms.offload()})))
        layers.*: checkpoint() -> offload()
        """
        lines, other = [], as_plan(other)
        for pattern in dict.fromkeys(rule.pattern for plan in (self, other) for rule in plan):
            before, after = (
                ", then ".join(repr(rule.transform) for rule in plan if rule.pattern == pattern) or "as written"
                for plan in (self, other)
            )
            if before != after:
                lines.append(f"{pattern or '(root)'}: {before} -> {after}")
        return "\n".join(lines)

    @property
    def parallel(self) -> Any:
        """The parallelism of the step that the plan was made for; `None` unless `memscale.plan` made the plan."""
        return None

    def of_functions(self) -> Plan:
        """Returns the plan with the rules for modules only."""
        return Plan([(rule.pattern, rule.transform) for rule in self if not is_of_optimizers(rule.transform)])

    def of_optimizers(self) -> Plan:
        """Returns the plan with the rules for optimizers only.

        >>> import memscale as ms
        >>> ms.Plan({"layers.*": ms.checkpoint(), "": ms.step_in_backward()}).of_optimizers()
        Plan({'': step_in_backward()})
        """
        return Plan([(rule.pattern, rule.transform) for rule in self if is_of_optimizers(rule.transform)])

    @property
    def hash(self) -> str:
        """The SHA-256 of the rules, in hexadecimal. Equal plans have equal hashes on every machine.

        >>> import memscale as ms
        >>> ms.Plan({"layers.*": ms.checkpoint()}).hash[:12]
        '7eedab98243b'

        Raises:
            PlanError: as `to_json`.
        """
        text = json.dumps(self._rules_data(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def _rules_data(self) -> list[dict[str, Any]]:
        return [{"path": rule.pattern, "transform": rule.transform.to_data()} for rule in self.rules]

    def to_json(self) -> str:
        """Returns the plan as JSON text, with a schema version.

        Raises:
            PlanError: a transform has an argument without a JSON form, such as a policy of the user's own.
        """
        return _DOCUMENT.write({"rules": self._rules_data()}, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Returns the plan that `to_json` wrote.

        Raises:
            PlanError: the text is truncated or not JSON, is of another schema version, or names a transform or
                policy that this version does not know.
            ConfigError: a transform or policy has arguments out of range.
        """
        rules = _DOCUMENT.read(text).get("rules")
        if not isinstance(rules, list) or not all(
            isinstance(rule, Mapping) and rule.keys() == {"path", "transform"} for rule in rules
        ):
            raise PlanError(f"a plan's 'rules' is a list of objects with 'path' and 'transform', got {rules!r}")
        return cls([(rule["path"], from_data(rule["transform"])) for rule in rules])

    def save(self, path: str | PathLike[str]) -> None:
        """Writes the plan to a file, as JSON.

        Raises:
            PlanError: as `to_json`, or the file cannot be written.
        """
        text = self.to_json()
        try:
            Path(path).write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"save({str(path)!r}): {error.strerror}; give a file in a folder that can be written"
            ) from error

    @classmethod
    def load(cls: type[_Plan], path: str | PathLike[str]) -> _Plan:
        """Reads a plan from a file that `save` wrote.

        >>> import os, tempfile, memscale as ms
        >>> plan = ms.Plan({"layers.*": ms.checkpoint()})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     plan.save(os.path.join(folder, "plan.json"))
        ...     ms.Plan.load(os.path.join(folder, "plan.json")) == plan
        True

        Raises:
            PlanError, ConfigError: as `from_json`, or the file cannot be read.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"load({str(path)!r}): {error}; give a file that Plan.save() wrote") from error
        return cls.from_json(text)  # type: ignore[return-value]

    def to_python(self) -> str:
        """Returns Python code that makes and applies this plan, ready to paste.

        >>> import memscale as ms
        >>> print(ms.Plan({"layers.*": ms.checkpoint()}).to_python())
        from memscale import Plan, checkpoint, transform
        <BLANKLINE>
        plan = Plan({
            'layers.*': checkpoint(),
        })
        fit = transform(model, plan)
        """
        text = repr(self)
        # Removes string literals (paths and names). Both kinds of quotes, or the one in "it's" would pair with another.
        code = re.sub(r"'(?:[^'\\]|\\.)*'" r'|"(?:[^"\\]|\\.)*"', "", text)
        roots = {spelling.partition(".")[0] for spelling in spellings()} | {"identity"}
        names = [name for name in sorted(roots) if re.search(rf"\b{name}\b", code)]
        header = f"from memscale import {', '.join(['Plan', *names, 'transform'])}"
        if re.search(r"\btorch\.", code):
            header = f"import torch\n{header}"
        opening, closing = text[: len("Plan({")], text[-len("})") :]
        if "{" in opening:
            lines = [f"    {rule.pattern!r}: {rule.transform!r}," for rule in self.rules]
        else:
            lines = [f"    ({rule.pattern!r}, {rule.transform!r})," for rule in self.rules]
        if lines:
            text = "\n".join([opening, *lines, closing])
        if any(is_of_optimizers(rule.transform) for rule in self):
            return f"{header}\n\nplan = {text}\nfit, optimizer = transform(model, plan, optimizer=optimizer)"
        return f"{header}\n\nplan = {text}\nfit = transform(model, plan)"


def as_plan(plan: Any) -> Plan:
    """Returns `plan` itself if it is a `Plan`, else a `Plan` made from the mapping or pairs."""
    if isinstance(plan, (str, os.PathLike)):
        is_text = isinstance(plan, str) and plan.lstrip().startswith("{")
        write = "Plan.from_json(text)" if is_text else f"Plan.from_json(Path({str(plan)!r}).read_text())"
        raise PlanError(
            f"a plan is a Plan or a mapping from paths to transforms, got {'JSON' if is_text else repr(plan)}; for a "
            f"budget write plan(model, batch, budget=...), and for {'this' if is_text else 'a file'} {write}"
        )
    if not isinstance(plan, Iterable):
        instead = f"; write {{'layers.*': {plan!r}}}, with your paths" if isinstance(plan, Transform) else ""
        raise PlanError(f"a plan is a Plan or a mapping from paths to transforms, got {shown(plan)}{instead}")
    return plan if isinstance(plan, Plan) else Plan(plan)


def _misfit(pattern: Any, value: Any) -> str | None:
    if (wrong := misfit(pattern)) is not None:
        return wrong
    if not isinstance(value, Transform):
        got = f"{shown(value)}{what_to_write(value)}"
        return f"the rule for {pattern!r} must be a transform such as checkpoint(), got {got}"
    return None
