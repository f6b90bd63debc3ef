"""The server of run history for a team: a Django site with accounts, projects, pages and an API, which the team hosts.

Importing this package loads neither PyTorch nor Django: `commands` sets Django up when a command runs.
"""

from memscale.server.commands import backup, invite, migrate, run
