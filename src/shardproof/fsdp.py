"""Fully sharded data parallel over flat buffers, with uneven shards whose layout follows from arithmetic.

These are the public names of `shardproof.training.fsdp`.
"""

from shardproof.training.fsdp import *  # noqa: F403
from shardproof.training.fsdp import __all__ as __all__
