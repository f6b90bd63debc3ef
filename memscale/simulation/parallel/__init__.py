"""A step that is one process's of several: its collectives, and what FSDP2 and DDP keep about a model."""
