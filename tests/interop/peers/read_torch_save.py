"""Reads a file of torch.save with `torch.load(weights_only=True)`: `read_torch_save.py FILE`."""

from __future__ import annotations

import sys

import torch
from peer_result import Result

result = Result()
result.add_tree(torch.load(sys.argv[1], map_location="cpu", weights_only=True))
result.facts["torch"] = torch.__version__
result.write()
