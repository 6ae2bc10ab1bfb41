"""Runs on the local disks of several nodes: the folders of all nodes as one storage, and copies on a partner.

Read `node_storage.py` for what is where, `node_group.py` for how the ranks find each other's folders, and
`file_service.py` for the other end of a `PeerStorage`. `missing_copies.py` makes copies that were lost again.
"""

from __future__ import annotations

from shardproof.checkpointer.nodes.missing_copies import MissingCopies
from shardproof.checkpointer.nodes.node_group import NodeGroup, join_nodes
from shardproof.checkpointer.nodes.node_storage import NodeStorage, NodesView

__all__ = ["MissingCopies", "NodeGroup", "NodeStorage", "NodesView", "join_nodes"]
