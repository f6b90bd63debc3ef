"""Callbacks for training frameworks, which `wrap` adds to their trainers. `import memscale` imports no framework.

`hf` is for the Trainer of transformers and its subclasses, `lightning` for Lightning's Trainer. Import the module to
use it directly; `wrap` imports it when it gets such a trainer.
"""

from memscale.integrations.mixed_precision import MixedPrecisionForward

__all__ = ["MixedPrecisionForward"]
