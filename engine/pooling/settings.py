"""What a checkpoint says about vectors, scores and labels: which hidden states become a text's
vector, how a pair of texts becomes a score, and which labels there are. Torch-free; read by both
processes.

    modules.json, 1_Pooling/config.json    sentence-transformers' description of an embedding model
    modules.json, 1_LogitScore/config.json the same of a reranker that answers yes or no
    config.json                            the architecture

A causal language model without such files both generates and embeds: by its last token, normalised.
"""

from __future__ import annotations

import math
import sys
from array import array
from operator import mul
from pathlib import Path
from typing import Annotated, Literal, get_args

import msgspec

from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.model_files.config_fields import ConfigFields, read_model_fields
from penstock.engine.model_files.json_file import is_present, read_json_list

Task = Literal["generate", "embed", "score", "classify"]
PoolingTask = Literal["embed", "score", "classify"]
Activation = Literal["sigmoid", "softmax", "identity"]
PoolingKind = Literal["last", "mean", "cls"]
PairFormat = Literal["pair", "yes_no"]

_DOES = {
    "generate": "generates text",
    "embed": "makes embeddings",
    "score": "scores pairs of texts",
    "classify": "classifies texts",
}
_ST_KINDS = {
    "pooling_mode_lasttoken": "last",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
}
# In sentence-transformers 6, one field names the kind.
_ST_NAMES = {"lasttoken": "last", "mean": "mean", "cls": "cls"}
# Of `transformers`: bidirectional, without keys and values to keep.
ENCODERS = (
    "Bert", "Roberta", "XLMRoberta", "DistilBert", "MPNet", "Electra", "ModernBert", "NomicBert"
)  # fmt: skip
_SIZES = ("dim", "hidden_size", "n_embd", "n_embed", "d_model")  # what families call it
_ENCODER_TASKS = {"Model": "embed", "ForMaskedLM": "embed", "ForSequenceClassification": "score"}
_IDENTITY = "Identity"
# Of a head with a number for each label, what its training says (`transformers`' field).
_OF_PROBLEMS: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "identity",
}
_DEFAULT_NUM_LABELS = 2  # of `transformers`, which then writes none into the config


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Parameters of a request for a vector, a score or labels, in place of output.

    Attributes:
        num_first_tokens: of a pair of texts, how many tokens the first one and what belongs to it
            have; 0: all.
    """

    task: PoolingTask
    num_first_tokens: Annotated[int, msgspec.Meta(ge=0)] = 0


class ModelPooling(msgspec.Struct, frozen=True, kw_only=True):
    """What a model can do, and how.

    Attributes:
        kind: the hidden states that become a vector: of the last token, the mean of all, or of the
            first.
        is_normalized: vectors have length 1.
        size: numbers of a vector.
        pair_format: how two texts become a prompt for a score: as the tokenizer joins pairs, or a
            question that is answered yes or no.
        answers, answer_tokens: what stands for yes and no; their ids, if the checkpoint has them.
        has_score_weight: the checkpoint has a head for scores; else they come from the answers.
        labels: names of what the head's numbers stand for; a model that scores has one.
        activation: what makes scores or probabilities of the model's numbers; a softmax is over
            all labels.
        is_encoder: a bidirectional model, run by `transformers`.
    """

    tasks: tuple[Task, ...] = ("generate", "embed")
    kind: PoolingKind = "last"
    is_normalized: bool = True
    size: int = 0
    pair_format: PairFormat = "pair"
    answers: tuple[str, str] = ("yes", "no")
    answer_tokens: tuple[int, int] | None = None
    has_score_weight: bool = False
    labels: tuple[str, ...] = ("",)
    activation: Activation = "sigmoid"
    is_encoder: bool = False

    def check_dimensions(self, dimensions: int | None) -> None:
        """
        Raises:
            InvalidRequestError: vectors are shorter.
        """
        if dimensions is not None and not 1 <= dimensions <= self.size:
            raise InvalidRequestError(
                f"dimensions must be between 1 and {self.size}, the size of this model's vectors",
                param="dimensions",
            )

    @property
    def needs_every_token(self) -> bool:
        """Whether a vector depends on hidden states that a prefix hit would skip."""
        return self.kind != "last"

    def refusal(self) -> InvalidRequestError:
        """The error of a request for what is not among `tasks`."""
        others = " and ".join(_DOES[each] for each in self.tasks)
        return InvalidRequestError(
            f"this server's model {others}: it has no support for this request", param="model"
        )


def numbers_of(vector: bytes) -> array[float]:
    """The numbers of a `RequestOutput.vector`."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers


def bytes_of(vector: array[float]) -> bytes:
    """The other way round."""
    if sys.byteorder == "big":
        vector = vector[:]
        vector.byteswap()
    return vector.tobytes()


def shortened(vector: array[float], size: int) -> array[float]:
    """The first numbers of a vector, normalised: of a model trained for it, a coarser embedding.

    Source: Kusupati et al., "Matryoshka Representation Learning", NeurIPS 2022.
    """
    first = vector[:size]
    length = math.sqrt(math.fsum(each * each for each in first)) or 1.0
    return array("f", (each / length for each in first))


def cosine(one: array[float], other: array[float]) -> float:
    """The cosine of the angle between two vectors."""
    product = sum(map(mul, one, other))
    lengths = math.hypot(*one) * math.hypot(*other)
    return product / lengths if lengths else 0.0


def read_pooling(path: Path, name: str = "") -> ModelPooling:
    """How the model in directory `path` makes vectors and scores.

    Args:
        name: of the model, as the user wrote it: Qwen3-Reranker's checkpoints were published as
            causal language models, and only their name tells them apart.

    Raises:
        ModelLoadError: a file that cannot be read, or a kind of module or pooling that is not
            supported.
    """
    fields = read_model_fields(path)
    architecture = (
        next(iter(fields.texts("architectures")), "") if "architectures" in fields else ""
    )
    sizes = fields.section("text_config") if "text_config" in fields else fields
    size = sizes.integer(next(filter(sizes.__contains__, _SIZES), "hidden_size"), 1)
    modules = _read_modules(path)
    encoder = _encoder_task(architecture)
    if encoder is not None or architecture.endswith("ForSequenceClassification"):
        labels = ("",) if encoder == "embed" else _labels(fields)
        heads_task: Task = "score" if len(labels) == 1 else "classify"
        pooling = ModelPooling(
            tasks=("embed" if encoder == "embed" else heads_task,),
            kind="mean" if encoder else "last",
            is_normalized=encoder is None,
            size=size,
            pair_format="pair" if encoder or not architecture.startswith("Qwen3") else "yes_no",
            has_score_weight=encoder != "embed",
            labels=labels,
            activation=_activation(fields, len(labels)),
            is_encoder=encoder is not None,
        )
        return _as_modules_say(pooling, path, modules)
    # Some of the oldest that generate are called so, GPT-2 for one.
    is_base = architecture.endswith("Model") and not architecture.endswith("LMHeadModel")
    pooling = ModelPooling(tasks=("embed",) if is_base else ("generate", "embed"), size=size)
    if "classifier_from_token" in fields:  # as vLLM's users write it
        tokens = fields.texts("classifier_from_token")
        if len(tokens) != 2:
            raise fields.error("classifier_from_token", "expected the tokens of no and yes")
        pooling = msgspec.structs.replace(pooling, answers=(tokens[1], tokens[0]))
    if "classifier_from_token" in fields or "qwen3-reranker" in f"{name} {path.name}".lower():
        pooling = msgspec.structs.replace(pooling, tasks=("score",), pair_format="yes_no")
    return _as_modules_say(pooling, path, modules)


def _encoder_task(architecture: str) -> Literal["embed", "score"] | None:
    for family in ENCODERS:
        task = _ENCODER_TASKS.get(architecture.removeprefix(family))
        if architecture.startswith(family) and task is not None:
            return "score" if task == "score" else "embed"
    return None


def _labels(fields: ConfigFields) -> tuple[str, ...]:
    """The names of the labels, as `transformers` reads them.

    Raises:
        ModelLoadError: they are not numbered from 0 on.
    """
    if "id2label" not in fields:
        num_labels = fields.integer("num_labels", _DEFAULT_NUM_LABELS)
        return tuple(f"LABEL_{number}" for number in range(num_labels))
    section = fields.section("id2label")
    names = [str(number) for number in range(len(list(section)))]
    if not names or set(section) != set(names):
        raise fields.error("id2label", "expected labels that are numbered from 0 on")
    return tuple(map(section.text, names))


def _activation(fields: ConfigFields, num_labels: int) -> Activation:
    """What is applied to the numbers of the labels, as sentence-transformers and vLLM read it."""
    if "problem_type" in fields and fields.text("problem_type") in _OF_PROBLEMS:
        return _OF_PROBLEMS[fields.text("problem_type")]
    section = fields.section("sentence_transformers")
    names = [
        source.text(field)
        for source, field in (
            (section, "activation_fn"),
            (fields, "sbert_ce_default_activation_function"),
        )
        if field in source
    ]
    if names and names[0].endswith(_IDENTITY):
        return "identity"
    return "sigmoid" if num_labels == 1 else "softmax"


def _read_modules(path: Path) -> list[ConfigFields]:
    file = path / "modules.json"
    if not is_present(file):
        return []
    return [
        ConfigFields(entry, path=file, within=f"[{number}]")
        for number, entry in enumerate(read_json_list(file))
    ]


def _as_modules_say(pooling: ModelPooling, path: Path, modules: list[ConfigFields]) -> ModelPooling:
    """
    Raises:
        ModelLoadError: a module that is not supported, such as another layer.
    """
    replace = msgspec.structs.replace
    has_pooling = False
    for module in modules:
        kind = module.text("type").rpartition(".")[2]
        if kind == "Transformer":
            continue
        if kind == "Normalize":
            pooling = replace(pooling, is_normalized=True)
        elif kind in ("Pooling", "LogitScore"):
            folder = module.text("path")
            if Path(folder).is_absolute() or ".." in Path(folder).parts:
                raise module.error("path", f"must lie within {path}")
            fields = read_model_fields(path / folder)
            if kind == "Pooling":
                has_pooling = True
                pooling = replace(
                    pooling, tasks=("embed",), kind=_kind(fields), is_normalized=False
                )
            else:
                answers = (
                    fields.integer("true_token_id", minimum=0),
                    fields.integer("false_token_id", minimum=0),
                )
                pooling = replace(
                    pooling, tasks=("score",), pair_format="yes_no", answer_tokens=answers
                )
        else:
            raise module.error("type", f"modules of the kind {kind} are not supported")
    if modules and not has_pooling and pooling.tasks == ("embed",):
        raise ModelLoadError(f"{path / 'modules.json'}: names no module of the kind Pooling")
    return pooling


def _kind(fields: ConfigFields) -> PoolingKind:
    """The kind of pooling that a Pooling module does."""
    if not fields.boolean("include_prompt", True):
        raise fields.error("include_prompt", "pooling without the prompt is not supported")
    asked = {
        name for name in fields if name.startswith("pooling_mode_") and fields.boolean(name, False)
    }
    names = [_ST_KINDS.get(each, each) for each in sorted(asked)]
    if not asked and "pooling_mode" in fields:
        names = [_ST_NAMES.get(fields.text("pooling_mode"), fields.text("pooling_mode"))]
    for kind in get_args(PoolingKind):
        if names == [kind]:
            return kind  # type: ignore[no-any-return]
    raise fields.error(
        "pooling_mode", f"expected one of last, mean and cls, not {', '.join(names) or 'none'}"
    )
