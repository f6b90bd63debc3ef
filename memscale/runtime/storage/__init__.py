"""Where moved bytes lie: arenas, files and their budgets."""

from memscale.runtime.storage.arena import PAGE_BYTES, page_aligned_memory

__all__ = ["PAGE_BYTES", "page_aligned_memory"]
