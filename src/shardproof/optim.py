"""Optimizers whose state is sharded over ranks or split between CPU and device.

These are the public names of `shardproof.training.optim`.
"""

from shardproof.training.optim import *  # noqa: F403
from shardproof.training.optim import __all__ as __all__
