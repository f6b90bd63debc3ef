"""Left out of the collection by pytest: a module with the name of another, for processes on the fake libraries."""

collect_ignore = ["fake_cupy"]
