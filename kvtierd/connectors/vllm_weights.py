"""What weights are called: the hub's commit where there is one, else a fingerprint of their files."""

from __future__ import annotations

from pathlib import Path

import blake3

_WEIGHTS = frozenset({".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz"})
_CODE = frozenset({".json", ".py"})
_NOT_OF_THE_MODEL = ("tokenizer", "vocab", "special_tokens", "added_tokens", "generation_config", "merges")


def fingerprint(path: Path) -> str:
    """BLAKE3 over the names and bytes of a model's files: weights, configuration, code; not the tokenizer.

    `path` is a folder or one file. Reads at some gigabytes a second from the page cache, where the engine has just left
    the weights. Raises ValueError when there are none.
    """
    files = [path] if path.is_file() else sorted(_files(path))
    if not any(file.suffix in _WEIGHTS for file in files):
        raise ValueError(f"{path} holds no weights ({', '.join(sorted(_WEIGHTS))})")
    digest = blake3.blake3(b"kvtierd weight files", max_threads=blake3.blake3.AUTO)
    for file in files:
        name = file.name if path.is_file() else file.relative_to(path).as_posix()
        digest.update(f"{name}|{file.stat().st_size}\n".encode())
        digest.update_mmap(file)
    return f"blake3:{digest.hexdigest()}"


def _files(folder: Path) -> list[Path]:
    return [
        file
        for file in folder.rglob("*")
        if file.suffix in _WEIGHTS | _CODE
        and not file.name.startswith(_NOT_OF_THE_MODEL)
        and not any(part.startswith(".") for part in file.relative_to(folder).parts)
        and file.is_file()
    ]


def commit_of(snapshot_file: Path) -> str | None:
    """The commit that a file of the hub's cache belongs to (`…/snapshots/<commit>/…`)."""
    parts = snapshot_file.parts
    if "snapshots" not in parts:
        return None
    after = parts[len(parts) - parts[::-1].index("snapshots") :]
    return after[0] if len(after) > 1 else None
