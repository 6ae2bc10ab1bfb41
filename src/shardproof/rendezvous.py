"""Meetings of ranks: each rank posts, rank 0 decides, each rank gets an answer. Moves no tensor data.

These are the public names of `shardproof.engine.rendezvous`.
"""

from shardproof.engine.rendezvous import *  # noqa: F403
from shardproof.engine.rendezvous import __all__ as __all__
