"""The machines an engine runs on."""
