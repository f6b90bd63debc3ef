"""The picture of a profile in the documentation: GPT-2 small on a card that need not be there.

python benchmarks/plot_profile.py  # writes docs/images/profile.png
"""

from __future__ import annotations

from pathlib import Path

import torch
import transformers

import memscale as ms

IMAGES = Path(__file__).parents[1] / "docs" / "images"


def main() -> None:
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).bfloat16()
    ids = torch.zeros(8, 1024, dtype=torch.long)
    optimizer = torch.optim.AdamW(model.parameters())
    profile = ms.profile(
        model, {"input_ids": ids, "labels": ids}, keeps_output=False, optimizer=optimizer, hardware="h100"
    )
    IMAGES.mkdir(exist_ok=True)
    profile.plot(IMAGES / "profile.png")
    print(profile)


if __name__ == "__main__":
    main()
