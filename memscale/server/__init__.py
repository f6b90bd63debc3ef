"""Run history for a team: a Django site with accounts, projects, pages and an API, on one machine of the team's own.

Loads neither PyTorch nor Django by itself: `commands` sets Django up when a command is run.
"""

from memscale.server.commands import backup, invite, migrate, run

__all__ = ["backup", "invite", "migrate", "run"]
