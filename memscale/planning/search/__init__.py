"""The search: limits one below the other, the choices for them, and simulated steps of those that may be the answer."""
