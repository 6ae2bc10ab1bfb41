"""Optimizers: what they have of each parameter, described and taken back by parameter name."""
