"""Optimizers: saves and restores the state of each parameter by the parameter's name."""
