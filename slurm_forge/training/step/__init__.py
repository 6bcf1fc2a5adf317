"""One update: gradients, the guard, the optimizer."""
