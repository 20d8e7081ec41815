"""Linear algebra on tensors: no layers and no state."""
