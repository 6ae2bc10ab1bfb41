"""Runs on the local disks of several nodes: the folders of all nodes as one storage, and copies on a partner.

`node_storage.py` defines which nodes have which files. In `node_group.py` the ranks find each other's
folders. `file_service.py` answers the requests of a `PeerStorage`. `missing_copies.py` replaces lost copies.
"""

from __future__ import annotations

from shardproof.runs.checkpointer.nodes.missing_copies import MissingCopies
from shardproof.runs.checkpointer.nodes.node_group import NodeGroup, join_nodes
from shardproof.runs.checkpointer.nodes.node_storage import NodeStorage, NodesView

__all__ = ["MissingCopies", "NodeGroup", "NodeStorage", "NodesView", "join_nodes"]
