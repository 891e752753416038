"""Vision towers of `transformers`: an image file in, features for the rows of its tokens out.

The towers and the image processors (with Pillow, without torchvision) are the library's. They run
in a thread of low priority beside the steps, one image at a time, so that no stream waits for a
picture; a step only copies finished features over the embeddings of image tokens.
"""

from __future__ import annotations

import copy
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoImageProcessor, PreTrainedConfig, PreTrainedModel

from penstock.engine.errors import ModelLoadError
from penstock.engine.models.language_model import EncodedImage
from penstock.engine.vision.image_file import open_image
from penstock.engine.vision.image_tokens import read_image_tokens
from penstock.kernels.cpu.cores import num_usable_cores

_TOWERS = {
    "gemma3": ("vision_tower", "multi_modal_projector"),
    "idefics3": ("vision_model", "connector"),
    "llava": ("vision_tower", "multi_modal_projector"),
    "llava_next": ("vision_tower", "multi_modal_projector"),
    "qwen2_5_vl": ("visual",),
    "qwen2_vl": ("visual",),
    "smolvlm": ("vision_model", "connector"),
}
_GRID_POSITIONS = ("qwen2_vl", "qwen2_5_vl")  # M-RoPE
_WHOLE = ("gemma3",)
_UNUSED_INPUTS = ("num_crops",)  # of processors
_NICE = 5  # a third of a stream's share where all cores are busy


def is_with_images(config: PreTrainedConfig) -> bool:
    """Whether a model is one whose tower we run."""
    return config.model_type in _TOWERS and getattr(config, "vision_config", None) is not None


def has_bidirectional_images(config: PreTrainedConfig) -> bool:
    """Whether an image's tokens attend to all of that image, not only to what comes before."""
    return is_with_images(config) and config.model_type in _WHOLE


def towers(model: PreTrainedModel, base: str) -> list[nn.Module]:
    """The modules of a model that only images go through."""
    within = model.get_submodule(base)
    return [within.get_submodule(name) for name in _TOWERS.get(model.config.model_type, ())]


class VisionEncoder:
    """The towers of one model, which they are taken out of.

    Args:
        model: has its weights, on its device.
        base: the name of the module that has the towers.
        path: the directory of the model's files.

    Attributes:
        token_id: of image tokens.
        has_grid: the features of an image have positions in a grid.
        has_bidirectional_images: an image's tokens attend to all of it.
        encoded: by digest; any thread may read it.

    Raises:
        ModelLoadError: the image processor cannot be read.
    """

    def __init__(self, model: PreTrainedModel, base: str, path: Path) -> None:
        config: Any = model.config
        tokens = read_image_tokens(path)
        assert tokens is not None, "both go by the type of the model"
        self.token_id = tokens.token_id
        self.has_grid = config.model_type in _GRID_POSITIONS
        self.has_bidirectional_images = has_bidirectional_images(config)
        self.encoded: dict[str, EncodedImage] = {}
        try:
            auto: Any = AutoImageProcessor
            self._processor = auto.from_pretrained(
                path, backend="pil", local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # whatever its files lead to
            raise ModelLoadError(f"{path}: its image processor cannot be read: {error}") from error
        within = model.get_submodule(base)
        # The same object without the language model; the language model's without the towers.
        self._within: Any = copy.copy(within)
        self._within._modules = {}
        for name in _TOWERS[config.model_type]:
            tower = within._modules.pop(name)
            assert tower is not None
            for each in tower.modules():
                if isinstance(each, PreTrainedModel):
                    each.set_attn_implementation("sdpa")
            self._within._modules[name] = tower
        self._dtype, self._device = config.dtype, next(self._within.parameters()).device
        self._set_up = threading.local()

    @property
    def weight_bytes(self) -> int:
        return sum(each.numel() * each.element_size() for each in self._within.parameters())

    @torch.inference_mode()
    def encode(self, digest: str, data: bytes) -> tuple[int, int]:
        """Compute an image's features and keep them: how many tokens and bytes they are."""
        if not getattr(self._set_up, "is_done", False):
            self._set_up.is_done = True
            with suppress(OSError):  # not everywhere has a thread a priority of its own
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
            torch.set_num_threads(num_usable_cores())  # this thread's; they have its priority
        image = open_image(data)
        inputs = self._processor(images=[image], return_tensors="pt")
        given = {
            name: each.to(self._device, self._dtype if each.is_floating_point() else each.dtype)
            for name, each in inputs.items()
            if isinstance(each, Tensor) and name not in _UNUSED_INPUTS
        }
        found = self._within.get_image_features(**given).pooler_output
        features = torch.cat(list(found)) if isinstance(found, list | tuple) else found
        features = features.reshape(-1, features.shape[-1]).to(self._dtype).clone()
        grid = None
        if self.has_grid:
            _, rows, columns = given["image_grid_thw"][0].tolist()
            merge = self._processor.merge_size
            grid = rows // merge, columns // merge
        self.encoded[digest] = EncodedImage(features, grid)
        return len(features), features.numel() * features.element_size()

    def drop(self, digest: str) -> None:
        """Forget an image that no sequence has."""
        del self.encoded[digest]
