"""``memscale cards``: the cards that ``--gpu`` and ``hardware=`` know by name."""

from __future__ import annotations

import dataclasses
import json

from memscale.cli.options import Options, PrintJson
from memscale.cli.terminal import show
from memscale.core import aligned
from memscale.hardware import CARDS, Hardware

_HEADER = ("name", "GiB", "usable", "dtype", "TFLOP/s", "GB/s", "host GB/s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CardsOptions(Options):
    """The command line of ``memscale cards``, as typed."""

    as_json: PrintJson = False


def cards(options: CardsOptions) -> None:
    """Prints the table of cards, grouped by maker and generation."""
    known = [(card, Hardware.named(card.name)) for card in CARDS]
    if options.as_json:
        data = [
            {
                "name": card.name,
                "usable_bytes": hardware.usable_bytes,
                "source": card.source,
                "hardware": json.loads(hardware.to_json()),
            }
            for card, hardware in known
        ]
        print(json.dumps(data))
        return
    rows: list[tuple[str, ...]] = [_HEADER]
    for card, hardware in known:
        dtype = "bfloat16" if "bfloat16" in card.tflops else "float16"
        speeds = (card.tflops[dtype], card.memory_gb_per_second, card.host_gb_per_second)
        sizes = (f"{nbytes / 2**30:.2f}" for nbytes in (hardware.memory_bytes, hardware.usable_bytes))
        rows.append((card.name, *sizes, dtype, *("shared" if speed is None else f"{speed:.4g}" for speed in speeds)))
    show("\n".join([*aligned(rows, "<>><>>>"), "sources of the figures: memscale cards --json"]))
