"""Folders of Accelerate, of the Trainer, and of sharded ``pytorch_model.bin`` files."""
