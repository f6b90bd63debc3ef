"""The offload runtime: where moved bytes live, and when they move."""
