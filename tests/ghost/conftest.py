"""What pytest is to leave alone here: a module with the name of another, and only for a process on the stand-ins."""

collect_ignore = ["stand_in_cupy"]
