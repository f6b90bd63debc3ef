"""What keeps a step from being simulated."""

from __future__ import annotations

from memscale.core.errors import MemscaleError


class NeedsValues(MemscaleError):
    """The step reads values that a simulation does not compute; `path` names the module that does."""

    def __init__(self, reason: str, path: str) -> None:
        super().__init__(f"{reason}{f' (in {path})' if path else ''}")
        self.reason = reason
        self.path = path
