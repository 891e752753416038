"""Bidirectional models (BERT, XLM-RoBERTa and kin), as `transformers` runs them: a text is computed
whole, in one step, and leaves no keys and values.

Texts of similar length share a forward pass. The longest of them sets its width; what the others
lack is masked, and changes their hidden states by no more than rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError, ModelLoadError
from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.model_files.json_file import GGUF_FILE, is_present, read_json
from penstock.engine.pooling.settings import ModelPooling
from penstock.engine.weights.formats import open_checkpoint, read_numbers

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
# Of these, the first text token has the position after that of the padding token.
_SHIFTED = ("Roberta", "XLMRoberta", "MPNet")
_MAX_PADDING = 8  # an eighth of a row
_UNUSED = ("pooler.", "embeddings.position_ids")


class Encoder:
    """
    Args:
        path: the directory of its files; weights as safetensors.

    Raises:
        ModelLoadError: the files are invalid, or lack weights.
        ConfigError: a setting that only models that generate have.
    """

    def __init__(
        self, config: ModelConfig, path: Path, pooling: ModelPooling, device: torch.device
    ) -> None:
        if config.quantization != "none" or config.quantization_rules:
            raise ConfigError("--quantization is not supported for an encoder")
        fields = read_model_fields(path)
        name = config.dtype
        if name == "auto":
            field = "dtype" if "dtype" in fields else "torch_dtype"
            name = fields.text(field, "float32")  # type: ignore[assignment]
        if name not in _DTYPES:
            raise fields.error("dtype", f"{name!r} is not supported")
        self.dtype = _DTYPES[name]
        self.device = device
        self.vocab_size = fields.integer("vocab_size")
        self.context_len = _context_len(fields, path)
        self._scores = "embed" not in pooling.tasks
        self._pad_token_id = fields.integer("pad_token_id", 0, minimum=0)
        self._has_types = fields.integer("type_vocab_size", 1, minimum=0) > 1
        self.module = _load(config, path, self.dtype, is_scorer=self._scores).to(device)

    @property
    def weight_bytes(self) -> int:
        """Size of the weights in memory."""
        return sum(each.nbytes for each in self.module.parameters())

    def __call__(
        self, texts: Sequence[Sequence[int]], num_first_tokens: Sequence[int]
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Batches of texts, as their numbers, with their hidden states, one text after the other
        [num_tokens, hidden_size]; of a model that scores or classifies, with the numbers of its
        head [num_texts, num_labels].

        Args:
            num_first_tokens: as in `PoolingParams`.
        """
        for numbers in _by_length([len(text) for text in texts]):
            width = len(texts[numbers[0]])
            ids = torch.full((len(numbers), width), self._pad_token_id)
            mask, types = torch.zeros_like(ids), torch.zeros_like(ids)
            for row, number in enumerate(numbers):
                text, num_first = texts[number], num_first_tokens[number]
                ids[row, : len(text)] = torch.tensor(text)
                mask[row, : len(text)] = 1
                if num_first:
                    types[row, num_first : len(text)] = 1
            inputs = {"input_ids": ids, "attention_mask": mask}
            if self._has_types:
                inputs["token_type_ids"] = types
            output = self.module(**{key: each.to(self.device) for key, each in inputs.items()})
            if self._scores:
                yield numbers, output.logits
            else:
                yield numbers, output.last_hidden_state[mask.bool().to(self.device)]


def _by_length(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Numbers of texts of similar length, the longest first."""
    batch: list[int] = []
    for number in sorted(range(len(lengths)), key=lambda number: -lengths[number]):
        if batch:
            widest = lengths[batch[0]]
            if (widest - lengths[number]) * _MAX_PADDING > widest:
                yield batch
                batch = []
        batch.append(number)
    if batch:
        yield batch


def _context_len(fields: ConfigFields, path: Path) -> int:
    """Tokens of a text, special ones among them."""
    length = fields.integer("max_position_embeddings") - _first_position(fields)
    file = path / "sentence_bert_config.json"
    if is_present(file):
        length = min(
            length, ConfigFields(read_json(file), path=file).integer("max_seq_length", length)
        )
    return length


def _first_position(fields: ConfigFields) -> int:
    if fields.texts("architectures")[0].startswith(_SHIFTED):
        return fields.integer("pad_token_id", 1, minimum=0) + 1
    return 0


def _load_gguf(kind: Any, path: Path, dtype: torch.dtype) -> Any:
    """The model of a GGUF file, whose matrices become dense, and whose positions begin with the
    first one of a text."""
    fields = read_model_fields(path)
    transformers: Any = import_module("transformers")
    settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
    checkpoint, model = open_checkpoint(path), kind.from_config(settings, dtype=dtype)
    for name, parameter in model.named_parameters():
        if not name.startswith(_UNUSED):
            first = _first_position(fields) if name.endswith("position_embeddings.weight") else 0
            num_rows, *rest = parameter.shape
            parameter.data[first:] = read_numbers(checkpoint, name, (num_rows - first, *rest))
    checkpoint.check_all_read(lambda _: False)
    return model.eval()


def _load(config: ModelConfig, path: Path, dtype: torch.dtype, *, is_scorer: bool) -> Any:
    transformers: Any = import_module("transformers")  # large, and for these models only
    kind = transformers.AutoModelForSequenceClassification if is_scorer else transformers.AutoModel
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()  # what matters of it is raised below
    transformers.utils.logging.disable_progress_bar()
    try:
        if config.load_format == "dummy":
            torch.manual_seed(config.seed or 0)
            settings = transformers.AutoConfig.from_pretrained(path, local_files_only=True)
            return kind.from_config(settings, dtype=dtype).eval()
        if is_present(path / GGUF_FILE):
            return _load_gguf(kind, path, dtype)
        model, about = kind.from_pretrained(
            path, dtype=dtype, output_loading_info=True, local_files_only=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ModelLoadError(f"{path}: transformers cannot load this model: {reason}") from error
    finally:
        transformers.utils.logging.set_verbosity(before)
    missing = [each for each in sorted(about["missing_keys"]) if not each.startswith(_UNUSED)]
    if missing:
        raise ModelLoadError(f"{path}: the checkpoint has no tensor {missing[0]}")
    return model.eval()
