"""The language: transforms and their compositions, modules as functions, plans, and the one interpreter of a plan."""
