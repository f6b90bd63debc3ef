"""Evidence as text. Consecutive parts with equal decisions share one row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from memscale.core import aligned, format_bytes, format_seconds, in_rows, row_label, wrapped
from memscale.planning.evidence.evidence import Decision, Evidence

_WHOLE = "(the model)"
_HEADER = ("part", "keeps", "as written", "time", "as written")


def explanation(evidence: Evidence) -> str:
    """Returns the evidence as text: rules, a row with the runner-up for parts alike, rejected candidates, notes."""
    lines = [wrapped(rule) for rule in evidence.trace]
    rows = rows_of(evidence.decisions)
    if rows:
        table = [(_name(row, evidence), *_figures(row)) for row in rows]
        first, *others = aligned([_HEADER, *table], f"<{'>' * (len(_HEADER) - 1)}", "   ")
        lines += ["", first]
        for line, row in zip(others, rows, strict=True):
            texts = (row[0].chosen, *reasons(row, evidence))
            lines += [line, *(wrapped(f"    {text}") for text in texts)]
        lines.append("(keeps: bytes held until backward; time: operators, forward and backward)")
    lines += [""] * bool(evidence.rejected or evidence.notes)
    for reason in dict.fromkeys(evidence.rejected.values()):
        which = "; ".join(candidate for candidate, its in evidence.rejected.items() if its == reason)
        lines.append(wrapped(f"ruled out: {which}: {reason}"))
    lines += [wrapped(f"note: {note}") for note in evidence.notes]
    return "\n".join(lines)


def about_parts(decisions: Sequence[Decision], evidence: Evidence) -> str:
    """Returns the decisions about some parts as text, a paragraph for each row of parts alike."""
    paragraphs = []
    for row in rows_of(decisions):
        kept, kept_before, seconds, seconds_before = _figures(row)
        paragraphs.append(
            "\n".join(
                [
                    f"{_name(row, evidence)}: {row[0].chosen}",
                    f"    keeps {kept} until backward, {kept_before} as written",
                    f"    takes {seconds}, {seconds_before} as written",
                    *(wrapped(f"    {text}") for text in reasons(row, evidence)),
                ]
            )
        )
    return "\n\n".join(paragraphs)


def reasons(row: Sequence[Decision], evidence: Evidence) -> list[str]:
    """Returns the rule of a row's decision as text, and its runner-up with the difference in time and memory."""
    first = row[0]
    found = [f"rule: {first.rule}"]
    if first.runner_up:
        change = first.runner_up_seconds - first.seconds
        pace = f"{format_seconds(abs(change))} {'faster' if change < 0 else 'slower'}" if change else "as fast"
        over = first.runner_up_peak_bytes - evidence.budget_bytes
        takes = f"{format_bytes(over)} more than the budget" if over > 0 else format_bytes(first.runner_up_peak_bytes)
        verdict = f"{pace}, {'but' if over > 0 and change < 0 else 'and'} the step would take {takes}"
        found.append(f"runner-up{' for one of them' if len(row) > 1 else ''}: {first.runner_up}: {verdict}")
    return found


def rows_of(decisions: Iterable[Decision]) -> list[list[Decision]]:
    """Returns the decisions in rows: consecutive parts with equal decisions are one row."""
    return list(in_rows(decisions, lambda each: each.path, _same))


def _name(row: Sequence[Decision], evidence: Evidence) -> str:
    return _WHOLE if len(evidence.decisions) == 1 and not row[0].path else row_label([each.path for each in row])


def _same(decision: Decision) -> object:
    return decision.chosen, decision.rule, decision.runner_up


def _figures(row: Sequence[Decision]) -> tuple[str, str, str, str]:
    return (
        format_bytes(sum(each.kept_bytes for each in row)),
        format_bytes(sum(each.kept_bytes_before for each in row)),
        format_seconds(sum(each.seconds for each in row)),
        format_seconds(sum(each.seconds_before for each in row)),
    )
