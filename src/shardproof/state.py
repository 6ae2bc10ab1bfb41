"""Converts live objects to sharded tensors and plain data, and back, on one rank without communication.

These are the public names of `shardproof.engine.state`.
"""

from shardproof.engine.state import *  # noqa: F403
from shardproof.engine.state import __all__ as __all__
