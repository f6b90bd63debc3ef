"""Parameters and gradients that live on another tier, above the engine."""
