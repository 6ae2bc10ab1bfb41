"""What DeepSpeed's build of an operator does with the lock of a killed rank: `deepspeed_lock.py FOLDER`.

A build that would wait for the lock raises instead, and the compilation is left out. The result has the lock
that a build waits for, and the folder that it would compile in once TORCH_EXTENSIONS_DIR names another one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed  # noqa: F401
from peer_result import Result
from torch.utils import cpp_extension


class BuildReachedError(Exception):
    """The build waits for a lock, or compiles."""


def wait(baton: cpp_extension.FileBaton) -> None:
    raise BuildReachedError(f"wait {baton.lock_file_path}")


def compile_in(*_: object, build_directory: str, **__: object) -> None:
    raise BuildReachedError(f"compile {build_directory}")


def reached() -> str:
    try:
        sys.modules["deepspeed.comm.torch"].build_shm_op()
    except BuildReachedError as error:
        return str(error)
    return "nothing"


def main() -> None:
    folder = Path(sys.argv[1])
    os.environ["HOME"] = str(folder / "home")
    for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
        os.environ.pop(name, None)
    cpp_extension.FileBaton.wait = wait
    cpp_extension._write_ninja_file_and_build_library = compile_in
    result = Result()
    kind, place = reached().split(" ", 1)
    result.facts["first"] = kind
    lock = Path(place) / "lock"
    lock.touch()  # a rank that is killed while it compiles leaves its lock
    result.facts["killed"] = reached() == f"wait {lock}"
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
    result.facts["elsewhere"] = reached().startswith(f"compile {folder / 'extensions'}")
    result.write()


if __name__ == "__main__":
    main()
