"""Tiny random models that take images, with processors and templates, as `transformers` has
them."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    CONFIG_MAPPING,
    AutoModelForImageTextToText,
    CLIPImageProcessorPil,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

KINDS = ("gemma3", "llava", "llava_next", "qwen2_vl", "qwen2_5_vl", "idefics3", "smolvlm")
_TEXT = {
    "vocab_size": 360, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024,
    "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
_SQUARE = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 7, "projection_dim": 32, "initializer_range": 0.3,
}  # fmt: skip
SPECIAL = (
    "<s>", "</s>", "<pad>", "<image>", "<|image_pad|>", "<|vision_start|>", "<|vision_end|>",
    "<|video_pad|>",
    "<start_of_image>", "<image_soft_token>", "<end_of_image>",
    "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)),
)  # fmt: skip
PINPOINTS = [[28, 56], [56, 28], [56, 56]]
IMAGE_TEXT = dict.fromkeys(KINDS, "<image>")  # of an image in a template
IMAGE_TEXT |= dict.fromkeys(
    ("qwen2_vl", "qwen2_5_vl"), "<|vision_start|><|image_pad|><|vision_end|>"
)
IMAGE_TEXT["gemma3"] = "<start_of_image>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}IMAGE{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each byte, and the special ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(
        models.BPE(vocab={each: number + 3 for number, each in enumerate(alphabet)}, merges=[])
    )
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def config_of(kind: str, token_ids: dict[str, int], **text_fields: Any) -> Any:
    if kind.startswith("qwen2"):
        vision: dict[str, Any] = {
            "depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        }  # fmt: skip
        if kind == "qwen2_vl":
            vision |= {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}
        else:
            vision |= {
                "hidden_size": 32, "out_hidden_size": 64, "intermediate_size": 48,
                "window_size": 16, "fullatt_block_indexes": [1],
            }  # fmt: skip
        rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
        return CONFIG_MAPPING[kind](
            text_config={**_TEXT, "rope_parameters": rope},
            vision_config=vision,
            image_token_id=token_ids["<|image_pad|>"],
            video_token_id=token_ids["<|video_pad|>"],
            vision_start_token_id=token_ids["<|vision_start|>"],
            vision_end_token_id=token_ids["<|vision_end|>"],
            tie_word_embeddings=False,
        )
    if kind == "gemma3":
        vision = {**_SQUARE, "model_type": "siglip_vision_model"}
        text = {**_TEXT, "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12}
        text |= {"layer_types": ["sliding_attention", "full_attention"]}
        return CONFIG_MAPPING[kind](
            text_config=text,
            vision_config=vision,
            mm_tokens_per_image=16,
            image_token_index=token_ids["<image_soft_token>"],
            boi_token_index=token_ids["<start_of_image>"],
            eoi_token_index=token_ids["<end_of_image>"],
            tie_word_embeddings=False,
        )
    vision = dict(_SQUARE)
    given: dict[str, Any] = {"image_token_id": token_ids["<image>"]}
    if kind.startswith("llava"):
        vision["model_type"] = "clip_vision_model"
        given |= {"vision_feature_layer": -2, "vision_feature_select_strategy": "default"}
    if kind == "llava_next":
        given["image_grid_pinpoints"] = PINPOINTS
    if kind in ("idefics3", "smolvlm"):
        del vision["projection_dim"]
        given["scale_factor"] = 2
    return CONFIG_MAPPING[kind](
        text_config={"model_type": "llama", **_TEXT, **text_fields},
        vision_config=vision,
        tie_word_embeddings=False,
        **given,
    )


def image_processor(kind: str) -> Any:
    if kind.startswith("qwen2"):
        return Qwen2VLImageProcessorPil(
            patch_size=4, merge_size=2, temporal_patch_size=2,
            size={"shortest_edge": 16 * 16, "longest_edge": 64 * 64},
        )  # fmt: skip
    if kind in ("idefics3", "smolvlm"):
        made = Idefics3ImageProcessorPil if kind == "idefics3" else SmolVLMImageProcessorPil
        return made(size={"longest_edge": 56}, max_image_size={"longest_edge": 28})
    if kind == "gemma3":
        return Gemma3ImageProcessorPil(size={"height": 28, "width": 28})
    square = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    if kind == "llava_next":
        return LlavaNextImageProcessorPil(**square, image_grid_pinpoints=PINPOINTS)
    return CLIPImageProcessorPil(**square)


def save_model(kind: str, path: Path, **text_fields: Any) -> PreTrainedModel:
    """A random model in directory `path`, as `transformers` reads it back, in fp32.

    Args:
        text_fields: of a language model that is not Gemma's or Qwen2-VL's.
    """
    words = tokenizer()
    ids = {text: words.convert_tokens_to_ids(text) for text in SPECIAL}
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(
        config_of(kind, ids, **text_fields), dtype=torch.float32
    )
    for parameter in model.parameters():
        if parameter.dim() == 1:  # norms of one and biases of zero would hide mistakes
            parameter.data += 0.1 * torch.randn_like(parameter)
        elif not parameter.any():  # Gemma 3's projection
            parameter.data += 0.3 * torch.randn_like(parameter)
        elif parameter.std() < 0.1:
            parameter.data *= 10.0
    model.save_pretrained(path)
    words.chat_template = _TEMPLATE.replace("IMAGE", IMAGE_TEXT[kind])
    words.save_pretrained(path)
    image_processor(kind).save_pretrained(path)
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    found: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32)
    return found.eval()


def picture(seed: int, width: int = 40, height: int = 30) -> bytes:
    """A PNG file of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()
