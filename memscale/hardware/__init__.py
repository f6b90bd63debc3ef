"""Devices as data: cards, measured speeds, and how long an operator takes by its FLOPs and traffic."""
