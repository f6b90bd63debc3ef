"""Simulation of one rank of a distributed step: its collectives, and the state that FSDP2 and DDP keep of a model."""
