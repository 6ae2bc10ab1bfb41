"""Long runs of arbitrary operations and faults, held against a simple model."""
