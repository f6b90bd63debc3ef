"""How training frameworks use memscale: what `wrap` adds to their trainers. None of them is imported by memscale.

`hf` is for the Trainer of transformers and those made of it, `lightning` for Lightning's. Each is imported by whoever
uses it, and by `wrap` when it is given such a trainer.
"""
