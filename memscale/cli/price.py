"""``--price`` and ``--tokens``: converts the time of a step to tokens a second, hours and dollars."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Annotated, Any

from typer import Option

from memscale.cli.options import number
from memscale.cli.step_options import RankOptions, Step, batch_of
from memscale.core import ConfigError, format_count

_AMOUNT = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmbt]?)", re.IGNORECASE)
_POWERS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def amount(text: str) -> float:
    """Parses a number such as ``"10B"``.

    >>> amount("10B"), amount("1.5k"), amount("300")
    (10000000000.0, 1500.0, 300.0)

    Raises:
        ConfigError: the text is no number, or 0.
    """
    found = _AMOUNT.fullmatch(text.strip())
    if found is None or not float(found[1]):
        raise ConfigError(
            f"--tokens must be a number above 0, with K, M, B or T behind it, got {text!r}; write --tokens 10B"
        )
    return float(found[1]) * _POWERS[found[2].lower()]


@dataclass(frozen=True, kw_only=True)
class PriceOptions(RankOptions):
    """The options of a step with the price of an hour and the number of tokens, as typed."""

    price: Annotated[
        float | None,
        number("The price of an hour of one card: shows tokens for a dollar.", least=0.01, metavar="DOLLARS"),
    ] = None
    tokens: Annotated[
        float | None,
        Option(parser=amount, metavar="10B", help="Tokens to train: shows the hours, and with --price dollars."),
    ] = None


@dataclass(frozen=True)
class Cost:
    """The cost of training at the speed of a step.

    Attributes:
        unit: ``"tokens"``, or ``"samples"`` if batches do not depend on a sequence length.
        per_second: units a second, of all cards together.
        per_dollar: units for a dollar; `None` without a price.
        hours: the hours for ``--tokens`` units; `None` without the option.
        dollars: the price of these hours; `None` without a price or hours.
        cards: the number of cards that are paid for.
    """

    unit: str
    per_second: float
    per_dollar: float | None
    hours: float | None
    dollars: float | None
    cards: int

    def __str__(self) -> str:
        words = [f"at most {format_count(self.per_second)} {self.unit} a second"]
        if self.per_dollar is not None:
            words.append(f"{format_count(self.per_dollar)} {self.unit} for a dollar")
        if self.hours is not None:
            paid = "" if self.dollars is None else f" and ${self.dollars:,.2f}"
            words.append(f"at least {self.hours:,.1f} hours{paid} for them all")
        return f"cost: {', '.join(words)}{f', on {self.cards} cards' if self.cards > 1 else ''}"


def cost_of(options: PriceOptions, step: Step, seconds: float | None, **size: int) -> Cost | None:
    """Returns the cost at `seconds` a step; `None` without a price and an amount, or if the time is unknown.

    Args:
        options: the options as typed.
        step: the step of the options.
        seconds: the seconds of the step.
        size: ``batch`` or ``seq`` of the step, if they differ from the options.
    """
    if (options.price is None and options.tokens is None) or not seconds:
        return None
    from memscale.planning import parts_of

    rows, length = size.get("batch", options.batch), size.get("seq", step.seq)
    short, long = (parts_of(batch_of(step.subject, 1, each)) for each in (1, 2))
    unit = "samples" if short == long else "tokens"
    cards = options.world or 1
    copies = cards // (options.tensor or 1)
    per_second = rows * (1 if unit == "samples" else length) * options.accumulate * copies / seconds
    hourly = None if options.price is None else options.price * cards
    hours = None if options.tokens is None else options.tokens / per_second / 3600
    return Cost(
        unit=unit,
        per_second=per_second,
        per_dollar=None if hourly is None else per_second * 3600 / hourly,
        hours=hours,
        dollars=None if hourly is None or hours is None else hours * hourly,
        cards=cards,
    )


def axis_of(options: PriceOptions, cost: Cost | None, seconds: float) -> dict[str, Any]:
    """Returns the arguments of ``Frontier.plot`` and ``html`` for an axis in dollars; empty without a price.

    Args:
        options: the options as typed.
        cost: the cost of one of the steps on the curve.
        seconds: the seconds of that step.
    """
    if options.price is None or cost is None:
        return {}
    wanted = {} if options.tokens is None else {"steps": math.ceil(options.tokens / (cost.per_second * seconds))}
    return {"price": options.price * cost.cards, **wanted}


def line_of(options: PriceOptions, cost: Cost | None) -> str:
    """Returns the line to print for a cost; empty without a price and an amount."""
    if cost is not None:
        return str(cost)
    wanted = options.price is not None or options.tokens is not None
    return "cost: unknown, like the time of a step on this device" if wanted else ""
