"""Where moved bytes lie: arenas, files and their budgets."""
