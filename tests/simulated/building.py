"""The simulated device's library: compiled if it does not exist yet."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from torch.utils import cpp_extension

__all__ = ["library", "why_not"]

LIMIT = 120.0
_SOURCES = [Path(__file__).parent / name for name in ("device.cpp", "call.h", "backend.h", "runtime.h")]


def why_not() -> str:
    """Why the simulated device is not available; empty if it is."""
    if sys.platform != "linux":
        return f"the simulated device is not written for {sys.platform}"
    if torch.__version__ < (2, 13):
        return f"the simulated device is written for torch 2.13 and newer, this is {torch.__version__}"
    if shutil.which(_compiler()[0]) is None:
        return f"the simulated device needs a C++ compiler: there is no {_compiler()[0]}"
    return ""


def _compiler() -> list[str]:
    """The command."""
    return shlex.split(os.environ.get("CXX", "")) or ["g++"]


def library() -> Path:
    """The path of the compiled library.

    Its name has a digest of the sources. A complete file is moved to that path, so two processes may compile
    at the same time.
    """
    found = _folder() / f"simulated-{_digest()}.so"
    if found.exists():
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.parent) as folder:
        made = Path(folder) / found.name
        run = subprocess.run(_command(made), capture_output=True, text=True, timeout=LIMIT, check=False)
        if run.returncode != 0:
            raise RuntimeError(f"the simulated device does not compile:\n{run.stderr[-4000:]}")
        made.replace(found)
    return found


def _command(made: Path) -> list[str]:
    includes = [f"-I{folder}" for folder in cpp_extension.include_paths()]
    folders = [f"-L{folder}" for folder in cpp_extension.library_paths()]
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    flags = ["-O1", "-std=c++20", "-fPIC", "-shared", "-w", abi]
    linked = [*folders, "-ltorch_cpu", "-lc10"]
    return [*_compiler(), *flags, *includes, str(_SOURCES[0]), "-o", str(made), *linked]


def _digest() -> str:
    digest = hashlib.sha256(f"{torch.__version__} {platform.machine()} {_compiler()}".encode())
    for source in _SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def _folder() -> Path:
    cache = os.environ.get("TORCH_EXTENSIONS_DIR") or os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "shardproof-tests"
