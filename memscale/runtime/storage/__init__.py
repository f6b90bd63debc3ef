"""Memory and files for moved bytes, and the budgets that limit them."""

from memscale.runtime.storage.arena import PAGE_BYTES, page_aligned_memory
