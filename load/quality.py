"""`penstock bench quality`: what fewer bits take from a model, and what they save, on the CPU.

Each setting's next-token probabilities are compared with those of the model as it is, in float32:
their Kullback-Leibler divergence, which is the steadiest judge, the likeliest token, and the
perplexity of the text. The texts are those of `quality_corpus`, in chunks that know nothing of each
other, as llama.cpp's `llama-perplexity` runs them; the demo model gets conversations of the kind
that it knows, and is judged by its answers.

All settings run beside the reference, so that no logits are kept; their weights are in memory
together. Speed is for `penstock bench engine --compare`.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from penstock.engine.config import DEMO_MODEL, DTYPES, DeviceConfig, EngineConfig, ModelConfig
from penstock.engine.errors import ConfigError
from penstock.engine.layers.attention import ForwardContext
from penstock.engine.model_files.resolve import resolve_model
from penstock.engine.models.backends import cpu_kernels, fastest
from penstock.engine.models.language_model import LanguageModel
from penstock.engine.models.loader import load_model
from penstock.engine.runner.device import resolve_kv_dtype, use_kv_dtype
from penstock.engine.runner.kv_cache import KVShape
from penstock.engine.text import ChatTemplate, Tokenizer
from penstock.load.engine import Setting
from penstock.load.report.options import add_out, positive
from penstock.load.report.tables import publish, table_of

if TYPE_CHECKING:
    from penstock.engine.demo.evaluate import Case

CORPUS = Path(__file__).parent / "quality_corpus"
_BLOCK_SIZE = 16
_ROWS = 128  # of logits at once: those of 512 tokens of a large vocabulary take half a GB
_TURNS_BEFORE = 5
_HIGH = 0.999
_CPU = torch.device("cpu")
_NOTES = """\
KL: Kullback-Leibler divergence of the next token's probabilities from the reference's, in nats: the
mean, and what 99.9 % of the places stay below. Same top: places whose likeliest token is the
reference's. Loss: perplexity by the reference's, less one. MB: of weights in memory."""


# -- the texts -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Text:
    """A text that is run on its own; what is predicted from token `start` on is judged."""

    token_ids: list[int]
    start: int


def corpus_texts(path: Path, tokenizer: Tokenizer, *, num_tokens: int, skip: int = 0) -> list[Text]:
    """A file, or all `.txt` files of a folder, in chunks; a rest at the end is left out.

    Args:
        num_tokens: of a chunk, with the token that the tokenizer puts before a text.
        skip: tokens of a chunk that are not judged; `llama-perplexity` skips half of them.

    Raises:
        ConfigError: there is no such file, or it is shorter than a chunk.
    """
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    try:
        text = "".join(file.read_text("utf-8") for file in files)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--corpus {path}: {error}") from error
    plain = tokenizer.encode(text, add_special_tokens=False)
    marked = tokenizer.encode("a")
    first = marked[: marked.index(tokenizer.encode("a", add_special_tokens=False)[0])]
    length = num_tokens - len(first)
    if length < 1 or not 0 <= skip < num_tokens:
        raise ConfigError(f"--skip {skip} leaves nothing of chunks of {num_tokens} tokens")
    chunks = [plain[at : at + length] for at in range(0, len(plain) - length + 1, length)]
    if not chunks:
        raise ConfigError(f"--corpus {path}: {len(plain)} tokens are less than a chunk")
    return [Text(first + chunk, max(1, len(first), skip)) for chunk in chunks]


def held_out_texts(path: Path, *, num_texts: int, seed: int, context_len: int) -> list[Text]:
    """Conversations of six turns, of the demo model's kind but in other words, that fit the model's
    context. The last answer is judged. Raises ConfigError
    if none fits."""
    from penstock.engine.demo.evaluate import held_out_answers

    tokenizer, template = Tokenizer.from_directory(path), ChatTemplate.from_directory(path)
    rng = random.Random(seed)
    cases = list(held_out_answers(rng, num_before=_TURNS_BEFORE))
    rng.shuffle(cases)

    def texts() -> Iterator[Text]:
        for case in cases:
            prompt = tokenizer.encode(_prompt(template, case), add_special_tokens=False)
            answer = tokenizer.encode(case[1].assistant, add_special_tokens=False)
            if len(prompt) + len(answer) <= context_len:
                yield Text(prompt + answer, len(prompt))

    chosen = list(islice(texts(), num_texts))
    if not chosen:
        raise ConfigError(f"no text fits a context of {context_len} tokens")
    return chosen


def _prompt(template: ChatTemplate, case: Case) -> str:
    """The conversation up to the last answer."""
    conversation, turn = case
    messages = [
        {"role": role, "content": content}
        for each in (*conversation.turns, turn)
        for role, content in (("user", each.user), ("assistant", each.assistant))
    ][:-1]
    return template.render(messages)


# -- what is compared ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Of one setting, over all texts; the reference's own is the first."""

    setting: str
    weight_bytes: int
    num_tokens: int
    kl_mean: float
    kl_high: float  # 99.9 % of the places are below
    same_top_share: float
    perplexity: float
    loss: float  # perplexity ÷ the reference's - 1


class LoadedModel:
    """A model with a KV pool for one text."""

    def __init__(self, config: EngineConfig) -> None:
        path = resolve_model(config.model, weights=True)
        decoder = load_model(config.model, path, _CPU)
        self.vocab_size, self.context_len = decoder.vocab_size, decoder.context_len
        use_kv_dtype(decoder, resolve_kv_dtype(config.cache, decoder.dtype))
        library = cpu_kernels(decoder, _BLOCK_SIZE, num_threads=config.device.num_threads)
        self._model: LanguageModel = fastest(decoder, _BLOCK_SIZE, library)
        self._shape = KVShape.of(self._model.state_spec, _BLOCK_SIZE)
        self._pool = self._shape.allocate(0, _CPU)

    @property
    def weight_bytes(self) -> int:
        return self._model.weight_bytes

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """[num_tokens, hidden_size] of one sequence, computed at once."""
        num_tokens = len(token_ids)
        if (num_blocks := self._shape.num_blocks_for(num_tokens)) > self._pool.shape[2]:
            self._pool = self._shape.allocate(num_blocks, _CPU)
        context = ForwardContext.of_sequence(self._pool, num_tokens)
        return self._model(torch.tensor(token_ids), context).clone()

    def log_probabilities(self, hidden: Tensor) -> Tensor:
        """float32 [num_rows, vocab_size]"""
        return self._model.logits(hidden).float().log_softmax(1)


@torch.inference_mode()
def compare(
    reference: LoadedModel, models: Mapping[str, LoadedModel], texts: Sequence[Text]
) -> list[Quality]:
    """Run every text through all models, the reference first.

    Raises:
        ConfigError: a model has another vocabulary.
    """
    every = {"reference": reference, **models}
    for name, model in models.items():
        if model.vocab_size != reference.vocab_size:
            raise ConfigError(
                f"{name} has a vocabulary of {model.vocab_size} tokens, the model one of "
                f"{reference.vocab_size}"
            )
    num_places, done = sum(len(each.token_ids) - each.start for each in texts), 0
    # Of all places: small tensors among large ones would fragment the heap.
    kls = {name: torch.empty(num_places, dtype=torch.double) for name in every}
    num_same, negative_log = dict.fromkeys(every, 0), dict.fromkeys(every, 0.0)
    for text in tqdm(texts, unit="text", disable=not sys.stderr.isatty()):
        judged = slice(text.start - 1, -1)
        hidden = {name: model.hidden(text.token_ids)[judged] for name, model in every.items()}
        after = torch.tensor(text.token_ids[text.start :])
        for at in range(0, len(after), _ROWS):
            rows = slice(at, at + _ROWS)
            exact = reference.log_probabilities(hidden["reference"][rows])
            probabilities, likeliest = exact.exp(), exact.argmax(1)
            for name, model in every.items():
                is_own = model is reference
                found = exact if is_own else model.log_probabilities(hidden[name][rows])
                kl = torch.linalg.vecdot(probabilities, exact - found)
                kls[name][done : done + len(kl)] = kl
                num_same[name] += int((found.argmax(1) == likeliest).sum())
                negative_log[name] += float(F.nll_loss(found, after[rows], reduction="sum"))
            done += len(exact)
    perplexities = {name: math.exp(each / num_places) for name, each in negative_log.items()}
    return [
        Quality(
            setting=name,
            weight_bytes=every[name].weight_bytes,
            num_tokens=num_places,
            kl_mean=float(kl.mean()),
            kl_high=float(kl.quantile(_HIGH)),
            same_top_share=num_same[name] / num_places,
            perplexity=perplexities[name],
            loss=perplexities[name] / perplexities["reference"] - 1.0,
        )
        for name, kl in kls.items()
    ]


# -- the command ---------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default=DEMO_MODEL, help="a directory, a GGUF file or a Hub id")
    add(
        "--settings",
        nargs="+",
        default=["none", "int8", "int4", "fp8", "kv-cache-dtype=int8", "kv-cache-dtype=fp8"],
        metavar="SETTING",
        help="which to compare: options of serve as one text, or in short, without hyphens, as "
        "int8,kv-cache-dtype=int8,no-quantize-activations or gguf=FILE",
    )
    add("--reference-dtype", default="float32", choices=DTYPES, help="of the model compared with")
    add("--corpus", type=Path, help="a text, or a folder of .txt files; default: the bundled one")
    add("--chunk", type=positive, default=512, help="tokens of a text that are run together")
    add("--skip", type=int, default=0, help="tokens at the start of a chunk that are not judged")
    add("--num-texts", type=int, default=0, help="chunks, spread over the corpus; 0: all")
    add("--num-threads", type=int, default=0, help="CPU threads; 0: the engine's choice")
    add("--seed", type=int, default=0, help="seed of conversations and prompts")
    add_out(parser)


def run(parsed: argparse.Namespace) -> int:
    """Measure all; print and write the table."""
    configs = {
        each.name: each.config(parsed.model, num_threads=parsed.num_threads)
        for each in map(Setting.parse, parsed.settings)
    }
    own = ModelConfig(model=parsed.model, dtype=parsed.reference_dtype)
    device = DeviceConfig(device="cpu", num_threads=parsed.num_threads or None)
    reference = LoadedModel(EngineConfig(model=own, device=device))
    texts = _texts(parsed, resolve_model(own, weights=True), reference.context_len)
    models = {name: LoadedModel(each) for name, each in configs.items()}
    qualities = compare(reference, models, texts)
    where = "conversations" if _are_conversations(parsed) else "texts"
    title = (
        f"{parsed.model}: {qualities[0].num_tokens:,} tokens of {len(texts):,} {where}, compared "
        f"with the model in {parsed.reference_dtype}"
    )
    report = "\n\n".join([title, _table(qualities), _NOTES])
    data = {
        "model": parsed.model,
        "reference_dtype": parsed.reference_dtype,
        "num_texts": len(texts),
        "qualities": [asdict(each) for each in qualities],
    }
    publish(parsed.out, "quality", "Quality", report, data)
    return 0


def _are_conversations(parsed: argparse.Namespace) -> bool:
    """Whether the demo model is asked what it was trained for; a wheel has not what trained it."""
    is_demo = parsed.corpus is None and parsed.model == DEMO_MODEL
    return is_demo and find_spec("penstock.engine.demo") is not None


def _texts(parsed: argparse.Namespace, path: Path, context_len: int) -> list[Text]:
    if _are_conversations(parsed):
        return held_out_texts(
            path, num_texts=parsed.num_texts or 20, seed=parsed.seed, context_len=context_len
        )
    chunks = corpus_texts(
        parsed.corpus or CORPUS,
        Tokenizer.from_directory(path),
        num_tokens=min(parsed.chunk, context_len),
        skip=parsed.skip,
    )
    step = max(1, len(chunks) // parsed.num_texts) if parsed.num_texts else 1
    return chunks[::step][: parsed.num_texts or None]


def _table(qualities: Sequence[Quality]) -> str:
    columns: dict[str, Callable[[Quality], str]] = {
        "setting": lambda each: each.setting,
        "MB": lambda each: f"{each.weight_bytes / 1e6:,.1f}",
        "KL": lambda each: f"{each.kl_mean:.5f}",
        "KL 99.9 %": lambda each: f"{each.kl_high:.4f}",
        "same top": lambda each: f"{each.same_top_share:.2%}",
        "perplexity": lambda each: f"{each.perplexity:,.4f}",
        "loss": lambda each: f"{each.loss:+.2%}",
    }
    return table_of(qualities, columns)
