"""Where a step's tokens have the features of images in place of embeddings, and which positions
M-RoPE gives them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.engine.batch import SequenceEntry
from penstock.engine.layers.attention import StepImages, WholeImage
from penstock.engine.models.language_model import EncodedImage, ImageEncoder

Integers = npt.NDArray[np.int64]


class SequenceImages:
    """The images of one sequence on the device.

    Attributes:
        rows: of each image, the positions of its tokens.
        offsets: int64 [3, num_prompt_tokens], what M-RoPE adds to each position for time, row and
            column; None: nothing.
        last_offset: the same for all positions after the prompt.
        has_bidirectional_images: an image's tokens attend to all of it.
    """

    def __init__(self, entry: SequenceEntry, encoder: ImageEncoder) -> None:
        ids = np.array(entry.token_ids[: entry.num_prompt_tokens])
        self.rows: list[Integers] = []
        self.encoded = [encoder.encoded[image.digest] for image in entry.images]
        for image in entry.images:
            span = ids[image.offset : image.offset + image.num_tokens]
            self.rows.append(image.offset + np.flatnonzero(span == encoder.token_id))
        self.offsets: Integers | None = None
        self.last_offset = 0
        self.has_bidirectional_images = encoder.has_bidirectional_images
        if encoder.has_grid:
            self.offsets, self.last_offset = _grid_offsets(len(ids), self.rows, self.encoded)

    def features(self, start: int, stop: int) -> list[tuple[Integers, Tensor]]:
        """The positions from `start` to `stop` that have features, and these."""
        found = []
        for rows, encoded in zip(self.rows, self.encoded, strict=True):
            first, last = np.searchsorted(rows, (start, stop))
            if first < last:
                found.append((rows[first:last], encoded.features[first:last]))
        return found

    def offsets_of(self, start: int, stop: int) -> Integers | None:
        """Offsets of the positions from `start` to `stop`: int64 [3, stop − start]"""
        if self.offsets is None:
            return None
        found = np.full((3, stop - start), self.last_offset)
        known = self.offsets[:, start:stop]
        found[:, : known.shape[1]] = known
        return found


def _grid_offsets(
    num_tokens: int, rows: Sequence[Integers], encoded: Sequence[EncodedImage]
) -> tuple[Integers, int]:
    """M-RoPE (Qwen2-VL, Wang et al., 2024, section 2.1): an image's tokens share one time, and
    their rows and columns count from it; text goes on after the largest position."""
    offsets = np.zeros((3, num_tokens), np.int64)
    moved = end = 0  # what text has to add after the last image, and where that ended
    for at, image in zip(rows, encoded, strict=True):
        assert image.grid is not None
        height, width = image.grid
        offsets[:, end : at[0]] = moved
        number = np.arange(len(at))
        base = int(at[0]) + moved
        grid = np.stack((np.zeros_like(number), number // width, number % width))
        offsets[:, at] = base + grid - at
        end = int(at[-1]) + 1
        moved = base + max(height, width) - end
    offsets[:, end:] = moved
    return offsets, moved


def step_images(
    sequences: Sequence[SequenceImages | None],
    starts: Sequence[int],
    stops: Sequence[int],
    device: torch.device,
) -> StepImages | None:
    """What images add to a step of these sequences, from `starts` to `stops`; None: nothing."""
    rows: list[Integers] = []
    features: list[Tensor] = []
    offsets: list[Integers] = []
    whole: list[WholeImage] = []
    has_offsets = False
    first_row = 0
    for number, (images, start, stop) in enumerate(zip(sequences, starts, stops, strict=True)):
        moved = None
        if images is not None:
            for at, found in images.features(start, stop):
                rows.append(at + (first_row - start))
                features.append(found)
                if images.has_bidirectional_images:
                    span = slice(int(rows[-1][0]), int(rows[-1][-1]) + 1)
                    whole.append(WholeImage(span, number, int(at[0])))
            moved = images.offsets_of(start, stop)
        has_offsets |= moved is not None
        offsets.append(np.zeros((3, stop - start), np.int64) if moved is None else moved)
        first_row += stop - start
    if not (rows or has_offsets):
        return None
    return StepImages(
        rows=torch.from_numpy(np.concatenate(rows)).to(device) if rows else None,
        features=torch.cat(features) if rows else None,
        offsets=torch.from_numpy(np.concatenate(offsets, axis=1)).to(device)
        if has_offsets
        else None,
        whole=tuple(whole),
    )
