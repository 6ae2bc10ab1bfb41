"""Events of saves and loads, for logs, terminals, traces and dashboards.

These are the public names of `shardproof.engine.events`.
"""

from shardproof.engine.events import *  # noqa: F403
from shardproof.engine.events import __all__ as __all__
