"""Conversion of checkpoints between formats: planned in units, written in parallel, verified."""
