"""Where a benchmark ran, for the files that its results are kept in."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch

import memscale as ms


def environment(device: str, *packages: str) -> dict[str, Any]:
    """The device, versions, `packages` among them, and the commit."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=False)
        return done.stdout.strip()

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in packages},
        "memscale": ms.__version__,
        "commit": git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain") else ""),
    }
