"""``python -m memscale.benchmarks``: known models on known cards, by exact simulation on any machine.

`subjects` are the models with their batches and published figures, `columns` what is done to them, `table` simulates
and compares, `__main__` is the command.
"""
