"""The files beside the weights that `from_pretrained` of transformers reads: configuration and tokenizer."""

from __future__ import annotations

from fnmatch import fnmatch
from pathlib import Path

from shardproof.engine.storage import Storage, storage_error
from shardproof.errors import StructureError

CONFIG = "config.json"
_FILES = (
    CONFIG,
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "chat_template*",
    "*processor_config.json",
)
NOTE = (
    f"from_pretrained also reads {CONFIG} and the files of the tokenizer, which no conversion writes. "
    "--like FOLDER (like= in Python) copies them from the folder of a model"
)


def model_files(folder: str) -> list[Path]:
    """The files of a model's folder that are no weights and no program.

    Args:
        folder: the local folder of a model that `from_pretrained` loads.

    Raises:
        StructureError: it is no folder, or has no configuration.
    """
    path = Path(folder)
    if not (path / CONFIG).is_file():
        raise StructureError(
            f"like: {folder} has no {CONFIG}: name the local folder of a model that from_pretrained loads"
        )
    return sorted(
        file
        for file in path.iterdir()
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in _FILES)
    )


def copy_model_files(folder: str, target: Storage) -> None:
    """Copies `model_files` to the folder of a new checkpoint, durably.

    Raises:
        StructureError: as `model_files`.
        StorageError: a file cannot be read or written.
    """
    for file in model_files(folder):
        try:
            content = file.read_bytes()
        except OSError as error:
            raise storage_error(error, "read", file) from error
        target.publish(file.name, content, replace=True)
