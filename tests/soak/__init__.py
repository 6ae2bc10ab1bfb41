"""Long runs of arbitrary operations and faults, compared with a simple model."""
