"""Storages: create, read, list, delete and publish files; `LocalStorage` does so in a folder.

These are the public names of `shardproof.engine.storage`.
"""

from shardproof.engine.storage import *  # noqa: F403
from shardproof.engine.storage import __all__ as __all__
