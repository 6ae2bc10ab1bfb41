"""Reads Zarr arrays with TensorStore: `read_tensorstore.py PATH`.

Every folder below PATH with the metadata of an array is opened, with the driver for its version of Zarr. A
key is the array's path, its parts joined by dots.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tensorstore
from peer_result import Result

DRIVERS = {".zarray": "zarr", "zarr.json": "zarr3"}

root = Path(sys.argv[1])
result = Result()
for name, driver in DRIVERS.items():
    for file in sorted(root.rglob(name)):
        folder = file.parent
        if folder.name.endswith(".sync"):  # lock folders of Megatron-Core
            continue
        if driver == "zarr3" and json.loads(file.read_text())["node_type"] != "array":
            continue
        spec: dict[str, Any] = {"driver": driver, "kvstore": {"driver": "file", "path": f"{folder}/"}}
        array = tensorstore.open(spec, read=True, open=True).result()
        key = ".".join(folder.relative_to(root).parts)
        result.add_tensor(key, array.read().result())
        result.facts.setdefault("drivers", {})[key] = driver
result.write()
