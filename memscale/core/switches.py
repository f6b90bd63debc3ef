"""The switches of `Config`. This table loads without PyTorch, for the command line."""

#: The field of a Config that allows each transform to a plan.
SWITCHES = {
    "checkpoint": "enable_checkpointing",
    "offload": "enable_offloading",
    "tile": "enable_tiling",
    "cast": "use_mixed_precision",
    "quantize_states": "use_8bit_optimizer",
}
