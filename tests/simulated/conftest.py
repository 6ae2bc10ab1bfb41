"""The simulated device's own tests run where it was loaded before them: see `plugin.py`."""

from __future__ import annotations

import torch

collect_ignore_glob = [] if hasattr(torch, "simulated") else ["test_*.py"]
