"""How many tokens an image takes in a prompt, and which: as each family's processor writes them.

A chat template writes one placeholder for an image. Here it becomes the text that the model was
trained on: as many image tokens as the vision tower makes features, and what the family writes
around them. Held against the processors of `transformers`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.engine.errors import InvalidRequestError
from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.model_files.json_file import read_json
from penstock.engine.request import ImageInput
from penstock.engine.vision.image_file import LoadedImage

# By model_type in `config.json`: see `_READERS`.
Expand = Callable[[int, int], str]
_PINPOINTS = "image_grid_pinpoints"
_MAX_RESIZED_SIDE = 4096  # of Idefics3's processor


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageTokens:
    """How prompts of one model have images.

    Attributes:
        placeholder: what a chat template writes for an image.
        token: the text of an image token, whose rows get the features; often the placeholder.
        token_id: its id.
        expand: width and height in pixels → the text in the place of a placeholder.
    """

    placeholder: str
    token: str
    token_id: int
    expand: Expand

    def expanded(self, text: str, images: Sequence[LoadedImage]) -> str:
        """A rendered prompt with the tokens of its images in the place of their placeholders.

        Raises:
            InvalidRequestError: it has another number of placeholders.
        """
        first, *others = text.split(self.placeholder)
        if len(others) != len(images):
            raise InvalidRequestError(
                f"the prompt has {len(others)} times {self.placeholder!r}, which stands "
                f"for an image, and {len(images)} images: no text may contain it"
            )
        parts = [first]
        for image, after in zip(images, others, strict=True):
            parts += (self.expand(image.width, image.height), after)
        return "".join(parts)

    def located(
        self, token_ids: Sequence[int], images: Sequence[LoadedImage]
    ) -> tuple[ImageInput, ...]:
        """The images of a prompt with the places of their tokens.

        Raises:
            InvalidRequestError: the prompt has other image tokens than theirs.
        """
        places = [at for at, each in enumerate(token_ids) if each == self.token_id]
        found: list[ImageInput] = []
        for image in images:
            num_features = self.expand(image.width, image.height).count(self.token)
            own, places = places[:num_features], places[num_features:]
            if len(own) < num_features:
                break
            found.append(
                ImageInput(
                    digest=image.digest,
                    offset=own[0],
                    num_tokens=own[-1] + 1 - own[0],
                    num_features=num_features,
                    data=image.data,
                )
            )
        if places or len(found) < len(images):
            raise InvalidRequestError("the images' tokens are not whole in the prompt")
        return tuple(found)


def read_image_tokens(path: Path) -> ImageTokens | None:
    """How the model in directory `path` takes images; None: it takes none.

    Raises:
        ModelLoadError: a field is missing, or not supported.
    """
    fields = read_model_fields(path)
    read = _READERS.get(fields.text("model_type", ""))
    if read is None or "vision_config" not in fields:
        return None
    return read(fields, _Processor.of(path))


class _Processor:
    """What a checkpoint says about its processor, whichever of its two files says so."""

    def __init__(self, values: Mapping[str, Any], path: Path) -> None:
        self._values, self._path = values, path

    @classmethod
    def of(cls, path: Path) -> _Processor:
        found = path / "config.json"
        values: dict[str, Any] = {_PINPOINTS: read_json(found).get(_PINPOINTS)}
        for name in ("processor_config.json", "preprocessor_config.json"):
            if (path / name).exists():
                found = path / name
                read = read_json(found)
                if isinstance(read, dict):
                    values |= {**read, **(read.get("image_processor") or {})}
        return cls(values, found)

    def get(self, name: str, default: Any = None) -> Any:
        value = self._values.get(name)
        return default if value is None else value

    def integer(self, name: str, default: int) -> int:
        values = {name: self.get(name, default)}
        return ConfigFields(values, path=self._path).integer(name)

    def edge(self, name: str, edge: str, default: int) -> int:
        """A side, or a number of pixels, of the sizes under a name."""
        sizes = self.get(name, {})
        values = {edge: sizes.get(edge, default) if isinstance(sizes, dict) else default}
        return ConfigFields(values, path=self._path, within=name).integer(edge)


def _token_id(fields: ConfigFields, default: int) -> int:
    name = "image_token_id" if "image_token_id" in fields else "image_token_index"
    return fields.integer(name, default, minimum=0)


def _num_patches(fields: ConfigFields) -> int:
    """Features of a picture by a tower for square pictures, without those that are dropped."""
    vision = fields.section("vision_config")
    kind = vision.text("model_type", "clip_vision_model")
    if kind not in ("clip_vision_model", "siglip_vision_model"):
        raise vision.error("model_type", f"{kind} is not supported")
    side = vision.integer("image_size", 336) // vision.integer("patch_size", 14)
    has_class = kind == "clip_vision_model"
    strategy = fields.text("vision_feature_select_strategy", "default")
    return side * side + has_class - (strategy == "default")


def _read_llava(fields: ConfigFields, _: _Processor) -> ImageTokens:
    number = _num_patches(fields)
    one = "<image>"
    return ImageTokens(
        placeholder=one,
        token=one,
        token_id=_token_id(fields, 32000),
        expand=lambda *_: one * number,
    )


def _read_llava_next(fields: ConfigFields, processor: _Processor) -> ImageTokens:
    vision = fields.section("vision_config")
    size = vision.integer("image_size", 336)
    side = size // vision.integer("patch_size", 14)
    if _num_patches(fields) != side * side:
        raise fields.error(
            "vision_feature_select_strategy", "leaves other features than those of patches"
        )
    pinpoints = processor.get(_PINPOINTS)
    if not _are_sizes(pinpoints):
        raise fields.error(_PINPOINTS, "expected a list of pairs of sides")
    one = "<image>"

    def expand(width: int, height: int) -> str:
        best_height, best_width = _best_size(width, height, pinpoints)
        rows, columns = side * (best_height // size), side * (best_width // size)
        if width / height > columns / rows:
            padding = (rows - int(round(height * (columns / width), 7))) // 2
            rows -= 2 * padding
        else:
            padding = (columns - int(round(width * (rows / height), 7))) // 2
            columns -= 2 * padding
        return one * (side * side + rows * columns + rows)  # each row ends with a newline

    return ImageTokens(placeholder=one, token=one, token_id=_token_id(fields, 32000), expand=expand)


def _are_sizes(pinpoints: object) -> bool:
    return (
        isinstance(pinpoints, list)
        and bool(pinpoints)
        and all(
            isinstance(pair, list) and len(pair) == 2 and all(isinstance(n, int) for n in pair)
            for pair in pinpoints
        )
    )


def _best_size(width: int, height: int, sizes: list[list[int]]) -> tuple[int, int]:
    """The (height, width) among `sizes` that keeps most of an image, and then wastes least."""

    def merit(size: list[int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, -(size[0] * size[1] - kept)

    best = max(sizes, key=merit)
    return best[0], best[1]


def _read_qwen2_vl(fields: ConfigFields, processor: _Processor) -> ImageTokens:
    patch, merge = processor.integer("patch_size", 14), processor.integer("merge_size", 2)
    least = processor.get("min_pixels") or processor.edge("size", "shortest_edge", 56 * 56)
    most = processor.get("max_pixels") or processor.edge("size", "longest_edge", 28 * 28 * 1280)
    one = "<|image_pad|>"

    def expand(width: int, height: int) -> str:
        rows, columns = _smart_resized(width, height, patch * merge, least, most)
        return one * (rows * columns)

    return ImageTokens(
        placeholder=one, token=one, token_id=_token_id(fields, 151655), expand=expand
    )


def _smart_resized(width: int, height: int, unit: int, least: int, most: int) -> tuple[int, int]:
    """Rows and columns of units: near the image's aspect ratio, with pixels between the bounds."""
    rows, columns = round(height / unit), round(width / unit)
    if rows * columns * unit * unit > most:
        scale = math.sqrt(height * width / most)
        return (
            max(1, math.floor(height / scale / unit)),
            max(1, math.floor(width / scale / unit)),
        )
    if rows * columns * unit * unit < least:
        scale = math.sqrt(least / (height * width))
        return math.ceil(height * scale / unit), math.ceil(width * scale / unit)
    return rows, columns


def _read_gemma3(fields: ConfigFields, processor: _Processor) -> ImageTokens:
    if processor.get("do_pan_and_scan"):
        raise fields.error("do_pan_and_scan", "crops of images are not supported")
    first, one, last = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
    text = f"\n\n{first}{one * fields.integer('mm_tokens_per_image', 256)}{last}\n\n"
    return ImageTokens(
        placeholder=first,
        token=one,
        token_id=_token_id(fields, 262144),
        expand=lambda *_: text,
    )


def _read_idefics3(fields: ConfigFields, processor: _Processor) -> ImageTokens:
    vision = fields.section("vision_config")
    side = vision.integer("image_size", 364) // vision.integer("patch_size", 14)
    number = side**2 // fields.integer("scale_factor", 2) ** 2
    tile = processor.edge("max_image_size", "longest_edge", 364)
    longest = processor.edge("size", "longest_edge", 4 * 364)
    splits = processor.get("do_image_splitting", True)
    one, around = "<image>", "<fake_token_around_image>"
    whole = f"{around}<global-img>{one * number}{around}"

    def expand(width: int, height: int) -> str:
        rows, columns = _tiles(width, height, tile, longest) if splits else (0, 0)
        if not rows:
            return whole
        lines = (
            "".join(
                f"{around}<row_{row + 1}_col_{column + 1}>{one * number}"
                for column in range(columns)
            )
            for row in range(rows)
        )
        return "\n".join(lines) + "\n\n" + whole

    return ImageTokens(
        placeholder=one, token=one, token_id=_token_id(fields, 128257), expand=expand
    )


def _tiles(width: int, height: int, tile: int, longest: int) -> tuple[int, int]:
    """Rows and columns of square tiles; none if one is enough."""
    # `_resize_output_size_rescale_to_max_len` and `…_scale_below_upper_bound` of the processor.
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    width, height = max(width, 1), max(height, 1)
    ratio = width / height
    if width >= height and width > _MAX_RESIZED_SIDE:
        width, height = _MAX_RESIZED_SIDE, int(_MAX_RESIZED_SIDE / ratio)
    elif height > width and height > _MAX_RESIZED_SIDE:
        width, height = int(_MAX_RESIZED_SIDE * ratio), _MAX_RESIZED_SIDE
    width, height = max(width, 1), max(height, 1)
    # `resize_for_vision_encoder`
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        rows = math.ceil(int(columns * tile / ratio) / tile)
    else:
        rows = math.ceil(height / tile)
        columns = math.ceil(int(rows * tile * ratio) / tile)
    return (rows, columns) if rows > 1 or columns > 1 else (0, 0)


_READERS: dict[str, Callable[[ConfigFields, _Processor], ImageTokens]] = {
    "gemma3": _read_gemma3,
    "llava": _read_llava,
    "llava_next": _read_llava_next,
    "qwen2_vl": _read_qwen2_vl,
    "qwen2_5_vl": _read_qwen2_vl,
    "idefics3": _read_idefics3,
    "smolvlm": _read_idefics3,
}
