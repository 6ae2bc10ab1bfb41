"""Boxes in a tensor's index space, and arithmetic on many of them at once. It needs numpy only.

These are the public names of `shardproof.engine.geometry`.
"""

from shardproof.engine.geometry import *  # noqa: F403
from shardproof.engine.geometry import __all__ as __all__
