"""The base of all other folders: errors, units, pytrees, values as data, path patterns, host memory, caches."""

import importlib
from typing import TYPE_CHECKING, Any

from memscale.core.disk_cache import DiskCache
from memscale.core.documents import Document
from memscale.core.errors import (
    Argument,
    BudgetError,
    ConfigError,
    CorrectnessError,
    MemscaleError,
    PlanError,
    PolicyFallbackNeeded,
    RuntimeUnavailable,
    TransformError,
    package,
    respelled,
)
from memscale.core.history_file import HISTORY, Record, history_path
from memscale.core.http import SITE, http_request
from memscale.core.interrupts import interrupts_held
from memscale.core.machine import (
    available_host_bytes,
    cgroup_limit_bytes,
    filesystem_of,
    folder_on_disk,
    is_in_memory,
    read_or_empty,
    state_folder,
)
from memscale.core.misuse import by_name, shown, takes_no
from memscale.core.paths import in_rows, in_runs, matches, misfit, numbers, row_label, template, written
from memscale.core.switches import SWITCHES
from memscale.core.units import (
    COLUMNS,
    aligned,
    budget_bytes,
    format_bytes,
    format_count,
    format_flops,
    format_seconds,
    format_unlike,
    table_lines,
    wrapped,
)
from memscale.core.validation import (
    TIERS,
    Check,
    Misfit,
    boolean,
    check_count,
    check_switch,
    check_tier,
    integer,
    optional,
    validate,
)

if TYPE_CHECKING:
    from memscale.core import batches, internals, pytrees
    from memscale.core.torch_names import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Imports the names that need PyTorch on first use, so that a server of run history works without PyTorch."""
    if name in ("batches", "internals", "pytrees"):  # `torch_names` imports these, so they cannot come from there
        return importlib.import_module(f"{__name__}.{name}")
    found = {} if name.startswith("_") else vars(importlib.import_module(f"{__name__}.torch_names"))
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals().update({each: value for each, value in found.items() if not each.startswith("_")})
    return found[name]
