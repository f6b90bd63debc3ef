"""The results of planning: `ProvenPlan` with its `Evidence`, the evidence as text, and the `Frontier` of plans."""
