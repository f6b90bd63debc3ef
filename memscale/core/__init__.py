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
)
from memscale.core.host import (
    available_host_bytes,
    cgroup_limit_bytes,
    filesystem_of,
    folder_on_disk,
    is_in_memory,
    read_or_empty,
)
from memscale.core.misuse import by_name, shown, takes_no
from memscale.core.paths import in_rows, in_runs, matches, misfit, numbers, row_label, template, written
from memscale.core.recording import HISTORY, Record, history_path
from memscale.core.units import (
    COLUMNS,
    aligned,
    budget_bytes,
    format_bytes,
    format_flops,
    format_seconds,
    format_unlike,
    table_lines,
    wrapped,
)
from memscale.core.validation import TIERS, Check, Misfit, boolean, check_count, check_tier, integer, optional, validate

if TYPE_CHECKING:
    from memscale.core import batches, internals, pytrees
    from memscale.core.torch_names import (
        Assembled,
        Loss,
        Value,
        assembled_in,
        call,
        changed_error,
        check_loss,
        compute_capability,
        described,
        device_type,
        factory,
        first_line,
        found_once,
        from_data,
        fsdp_groups,
        fsdp_groups_of,
        in_process_group,
        is_alone,
        is_of_modules,
        is_own_thread,
        joining,
        modules_in,
        one_at_a_time,
        own_threads,
        scalar_loss,
        simulated,
        simulating,
        simulation,
        spellings,
        tensors,
        unflatten,
        version,
        versions,
    )

__all__ = [
    "COLUMNS",
    "HISTORY",
    "TIERS",
    "Argument",
    "Assembled",
    "BudgetError",
    "Check",
    "ConfigError",
    "CorrectnessError",
    "DiskCache",
    "Document",
    "Loss",
    "MemscaleError",
    "Misfit",
    "PlanError",
    "PolicyFallbackNeeded",
    "Record",
    "RuntimeUnavailable",
    "TransformError",
    "Value",
    "aligned",
    "assembled_in",
    "available_host_bytes",
    "batches",
    "boolean",
    "budget_bytes",
    "by_name",
    "call",
    "cgroup_limit_bytes",
    "changed_error",
    "check_count",
    "check_loss",
    "check_tier",
    "compute_capability",
    "described",
    "device_type",
    "factory",
    "filesystem_of",
    "first_line",
    "folder_on_disk",
    "format_bytes",
    "format_flops",
    "format_seconds",
    "format_unlike",
    "found_once",
    "from_data",
    "fsdp_groups",
    "fsdp_groups_of",
    "history_path",
    "in_process_group",
    "in_rows",
    "in_runs",
    "integer",
    "internals",
    "is_alone",
    "is_in_memory",
    "is_of_modules",
    "is_own_thread",
    "joining",
    "matches",
    "misfit",
    "modules_in",
    "numbers",
    "one_at_a_time",
    "optional",
    "own_threads",
    "pytrees",
    "read_or_empty",
    "row_label",
    "scalar_loss",
    "shown",
    "simulated",
    "simulating",
    "simulation",
    "spellings",
    "table_lines",
    "takes_no",
    "template",
    "tensors",
    "unflatten",
    "validate",
    "version",
    "versions",
    "wrapped",
    "written",
]


def __getattr__(name: str) -> Any:
    """Imports the names that need PyTorch on first use, so that a server of run history works without PyTorch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name in ("batches", "internals", "pytrees"):  # `torch_names` imports these, so they cannot come from there
        return importlib.import_module(f"{__name__}.{name}")
    from memscale.core import torch_names

    globals().update({each: getattr(torch_names, each) for each in torch_names.__all__})
    return globals()[name]
