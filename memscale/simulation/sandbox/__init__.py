"""The sandbox of a simulated step: the caller's objects and the process, with each change undone afterwards."""
