"""Finding a model's files and reading the small ones; torch-free, used by both processes.

A model is a packaged one (`demo`, `smollm2`), a directory, a GGUF file, or a Hugging Face Hub id;
for a GGUF file there, with its quantization, as in `repo:Q4_K_M`.
`huggingface_hub` itself reads `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE`. It is imported only for a
Hub id: with its HTTP client it is a tenth of what a gateway imports.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.engine.config import ModelConfig
from penstock.engine.errors import ConfigError, InvalidRequestError, ModelLoadError
from penstock.engine.model_files.config_fields import MAX_INTEGER, ConfigFields, read_model_fields
from penstock.engine.model_files.end_tokens import end_token_ids
from penstock.engine.model_files.gguf.choice import choose_gguf, gguf_folder, stands_for
from penstock.engine.model_files.json_file import (
    ADDITIONAL_TEMPLATES,
    GGUF_MAGIC,
    check_file,
    is_present,
    read_json,
    weight_samples,
)
from penstock.engine.model_files.packaged_models import (
    PACKAGED_MODELS,
    packaged_model,
    packaged_path,
)
from penstock.engine.request import SAMPLING_PARAMETERS, SamplingParams
from penstock.kernels.cache_folder import NoCacheError

DEMO_MODEL_PATH = Path(__file__).parent / "demo"  # where `PACKAGED_MODELS` finds it
_TEXT_FILES = ("*.json", "*.jinja", "*.model")
_WEIGHT_FILES = ("*.safetensors",)
_WEIGHTS = (*_WEIGHT_FILES, "*.gguf")
_NOT_NEEDED = ("*/*", "consolidated*")  # subfolders, and a copy of the weights in another format
_MODULES = ("[0-9]*_*/config.json",)  # of models that embed or score: small files in subfolders
_MAX_TEMPLATE_BYTES = 96 << 10  # of a text: Linux starts no process with a longer argument


def resolve_model(config: ModelConfig, *, weights: bool) -> Path:
    """The directory of the model's files, downloaded from the Hub if necessary. With `--tokenizer`,
    `--chat-template` or `--hf-overrides`, a directory that is made of it (`composed_directory`).

    Args:
        weights: also fetch the safetensors files, which the gateway does not need.

    Raises:
        ModelLoadError: no such directory or repository, or the Hub cannot be reached.
        ConfigError: what `--chat-template` says is no template.
    """
    template = _given_template(config.chat_template)
    path, fields = _resolve(config, weights=weights), config.config_overrides
    other = None
    own = (config.model, config.revision)
    tokenizer = (config.tokenizer or config.model, config.tokenizer_revision)
    if tokenizer[1] is None and tokenizer[0] == config.model:
        tokenizer = own
    if tokenizer != own:
        settings = replace(config, model=tokenizer[0], revision=tokenizer[1])
        try:
            other = _resolve(settings, weights=False, required="tokenizer.json")
        except ModelLoadError as error:
            raise ModelLoadError(f"--tokenizer: {error}") from error
    if other is None and not fields and not template:
        return path
    arguments = [str(path), None if other is None else str(other), fields, template]
    return _made_by("penstock.engine.model_files.composed_directory", json.dumps(arguments))


def _given_template(given: str | None) -> dict[str, str]:
    """`--chat-template`: a file, or as vLLM has it, a text with braces or a line end.

    Returns:
        The `file` or the `text`; nothing if it is not given.

    Raises:
        ConfigError: it is neither.
    """
    if given is None:
        return {}
    try:
        file = Path(given).expanduser()
        is_file = given != "" and file.exists()
    except (OSError, RuntimeError, ValueError):  # such as a name that is too long, ~nobody
        is_file = False
    if is_file:
        try:
            check_file(file)
        except ModelLoadError as error:
            raise ConfigError(f"--chat-template: {error}") from error
        return {"file": str(file.absolute())}
    if not any(character in given for character in "{}\n"):
        raise ConfigError(f"--chat-template: there is no file {given!r}, and it is no template")
    if len(json.dumps(given)) > _MAX_TEMPLATE_BYTES:
        raise ConfigError("--chat-template: a text this long must be in a file")
    return {"text": given}


def is_local(config: ModelConfig) -> bool:
    """Whether the model's files were there before, and not fetched from the Hub."""
    return config.model in PACKAGED_MODELS or Path(config.model).expanduser().exists()


def _resolve(config: ModelConfig, *, weights: bool, required: str = "config.json") -> Path:
    path = packaged_path(config.model) or Path(config.model)
    try:
        path = path.expanduser()
        is_directory, is_there = path.is_dir(), path.exists()
        is_gguf = path.is_file() and (path.suffix == ".gguf" or _begins_as_gguf(path))
    except (OSError, RuntimeError) as error:  # such as a folder without access, ~nobody
        reason = getattr(error, "strerror", None) or str(error)
        raise ModelLoadError(f"cannot read the model path {config.model!r}: {reason}") from error
    if is_gguf:
        return _made_of_gguf(path)
    if is_directory:
        if not is_present(path / required):
            names = (str(each.relative_to(path)) for each in path.glob("*.gguf"))
            if files := choose_gguf(names, "", str(path)):
                return _made_of_gguf(path / files[0])
        return _require(path, required)
    if is_there or config.model.startswith((".", "/", "~")) or config.model.count("/") > 1:
        raise ModelLoadError(f"model path {config.model!r} is not a directory or GGUF file")
    repository, is_labelled, label = config.model.partition(":")
    if is_labelled:
        found = _gguf_of_hub(replace(config, model=repository), label)
        if found is None:
            raise ModelLoadError(f"model {repository!r} has no GGUF files")
        return _require(found, required)
    path = _download(config, weights=weights)
    if not is_present(path / required):
        path = _gguf_of_hub(config, "") or path
    return _require(path, required)


def _made_of_gguf(file: Path) -> Path:
    with suppress(NoCacheError, OSError):  # whoever makes it says why not
        folder = gguf_folder(file)
        if stands_for(folder, file):
            return folder
    return _made_by("penstock.engine.model_files.gguf.directory", str(file.absolute()))


def _begins_as_gguf(file: Path) -> bool:
    """Whether a file without the suffix is a GGUF file, as those that other programs name by a
    digest."""
    with file.open("rb") as data:
        return data.read(len(GGUF_MAGIC)) == GGUF_MAGIC


def _made_by(module: str, argument: str) -> Path:
    """The directory that a module makes in a process of its own, and prints."""
    command = [sys.executable, "-m", module, argument]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise ModelLoadError(reason)
    return Path(done.stdout.strip().splitlines()[-1])


def _download(config: ModelConfig, *, weights: bool) -> Path:
    wants_weights = weights and config.load_format != "dummy"
    patterns = [*_TEXT_FILES, *(_WEIGHT_FILES if wants_weights else ())]
    if weights and config.trust_remote_code:
        patterns.append("*.py")
    with _hub_errors(config):
        fetch = _fetcher(config)
        path = Path(fetch(allow_patterns=patterns, ignore_patterns=list(_NOT_NEEDED)))
        if is_present(path / "modules.json"):
            fetch(allow_patterns=list(_MODULES))
        if is_present(path / "chat_template.jinja"):
            fetch(allow_patterns=[ADDITIONAL_TEMPLATES])
        return path


def _gguf_of_hub(config: ModelConfig, label: str) -> Path | None:
    """The directory made of a repository's GGUF file; None: it has none.

    Args:
        label: how it is quantized, as in its name; empty: the repository has only one.
    """
    with _hub_errors(config) as where:
        fetch = _fetcher(config)
        files = choose_gguf(_names_on_hub(config), label, where)
        if not files:
            return None
        path = Path(fetch(allow_patterns=list(files)))
    return _made_of_gguf(path / files[0])


def _names_on_hub(config: ModelConfig) -> list[str]:
    """The names of a repository's files; of those in the cache, where the Hub cannot be asked."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        about = HfApi().model_info(config.model, revision=config.revision or "main")
        return [each.rfilename for each in about.siblings or ()]
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception:  # the Hub client's HTTP library differs by version
        path = Path(_fetcher(config)(local_files_only=True, allow_patterns=[]))
        return [str(each.relative_to(path)) for each in path.rglob("*.gguf")]


def _fetcher(config: ModelConfig) -> Callable[..., str]:
    from huggingface_hub import snapshot_download

    return partial(
        snapshot_download, config.model, revision=config.revision, cache_dir=config.download_dir
    )


@contextmanager
def _hub_errors(config: ModelConfig) -> Iterator[str]:
    """Errors of the Hub's client as one line, which names the model as this yields it."""
    from huggingface_hub import errors

    where = f"model {config.model!r}" + (f" at {config.revision!r}" if config.revision else "")
    try:
        yield where
    except ModelLoadError:
        raise
    except errors.GatedRepoError as error:
        raise ModelLoadError(f"{where} is gated: ask for access and set HF_TOKEN") from error
    except errors.RevisionNotFoundError as error:
        raise ModelLoadError(f"{where}: no such revision on the Hub") from error
    except errors.RepositoryNotFoundError as error:
        raise ModelLoadError(
            f"{where} is neither a directory here nor a repository on the Hub "
            "(a private one needs HF_TOKEN)"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise ModelLoadError(
            f"{where} is not a directory here, not in the Hub cache, and the Hub cannot be reached"
        ) from error
    except (errors.HFValidationError, ValueError) as error:
        raise ModelLoadError(f"{where} is neither a directory nor a valid Hub id") from error
    except Exception as error:  # the Hub client's HTTP library differs by version
        raise ModelLoadError(f"{where} could not be downloaded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _require(path: Path, name: str) -> Path:
    if not is_present(path / name):
        raise ModelLoadError(f"{path} is not a model directory: {name} is missing")
    check_file(path / name)
    return path


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """A model's generation config.

    Attributes:
        sampling: values of `SamplingParams` where a request has none.
        max_new_tokens: of any output (`--override-generation-config`); None: what a request asks.
    """

    eos_token_ids: tuple[int, ...] = ()
    max_new_tokens: int | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)


def read_generation_defaults(
    path: Path,
    mode: str = "auto",
    overrides: Mapping[str, Any] | None = None,
    *,
    model: str = "",
) -> GenerationDefaults:
    """EOS ids and sampling defaults of the model in directory `path`.

    `mode` is `--generation-config`: with `none` (or without a `generation_config.json`) there are
    no sampling defaults, and EOS comes from the other places that name it; see `end_tokens`.
    `overrides` come before the file's fields, whatever the mode; their EOS is the only one.
    `model` is its name: a packaged one has defaults where the file has none.

    Raises:
        ModelLoadError: names the file that cannot be read, or the field that is no value or id.
    """
    config = read_model_fields(path)
    file = path / "generation_config.json"
    has_own = mode == "auto" and is_present(file)
    generation = ConfigFields(read_json(file) if has_own else {}, path=file)
    given = _given_defaults(overrides or {})
    packaged = packaged_model(model) if mode == "auto" else None
    recommended = {} if packaged is None else packaged.sampling
    sampling = {**recommended, **_sampling_of(generation), **_sampling_of(given)}
    try:  # now, instead of at every request
        SamplingParams(**_sampling_of(given))
    except InvalidRequestError as error:
        raise ConfigError(f"--override-generation-config: {error}") from error
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ModelLoadError(f"{file}: {error}; --generation-config none ignores it") from error
    num_tokens = config.integer("vocab_size", MAX_INTEGER)
    for fields in (generation, config):
        for name in ("bos_token_id", "pad_token_id"):  # not used, and may lie beside the vocabulary
            fields.token_ids(name, lowest=-1, num_tokens=MAX_INTEGER)
    return GenerationDefaults(
        eos_token_ids=given.token_ids("eos_token_id", num_tokens=num_tokens)
        if "eos_token_id" in given
        else end_token_ids(path, generation, config, num_tokens=num_tokens),
        sampling=sampling,
        max_new_tokens=given.integer("max_new_tokens") if "max_new_tokens" in given else None,
    )


def _given_defaults(overrides: Mapping[str, Any]) -> ConfigFields:
    """
    Raises:
        ConfigError: a field has no meaning here.
    """
    known = [*_defaults_of_models(), "max_new_tokens", "eos_token_id"]
    if unknown := [name for name in overrides if name not in known]:
        raise ConfigError(
            f"--override-generation-config has no field {unknown[0]!r}: choose from "
            f"{', '.join(known)}"
        )
    return ConfigFields(overrides, path=Path("--override-generation-config"))


def _defaults_of_models() -> dict[str, Any]:
    """Types of the sampling parameters for which models have defaults."""
    return {
        name: parameter.type
        for name, parameter in SAMPLING_PARAMETERS.items()
        if parameter.declared.has_model_default
    }


def _sampling_of(fields: ConfigFields) -> dict[str, Any]:
    return {
        name: _sampling_value(fields, name, kind)
        for name, kind in _defaults_of_models().items()
        if name in fields
    }


def _sampling_value(fields: ConfigFields, name: str, kind: Any) -> Any:
    value = fields.number(name, minimum=-MAX_INTEGER, maximum=MAX_INTEGER)
    if kind is int and not value.is_integer():
        raise fields.error(name, f"expected an integer, not {value:g}")
    return kind(value)


def weights_fingerprint(path: Path, *, with_times: bool = False) -> bytes:
    """Distinguishes one model's KV from another's: 32 bytes, the same on every machine.

    SHA-256 over `config.json` and, for each file of weights in order of name, its name, size and
    beginning, and samples evenly spaced from start to end. A fine-tune of most weights changes it;
    a change of a few small tensors in a large file may not.

    Args:
        with_times: when a file was written counts too, for what is kept on this machine only.
    """
    digest = hashlib.sha256((path / "config.json").read_bytes())
    for file in sorted(each for pattern in _WEIGHTS for each in path.glob(pattern)):
        check_file(file)
        facts = file.stat()
        digest.update(f"{file.name}\0{facts.st_size}\0".encode())
        if with_times:
            digest.update(f"{facts.st_mtime_ns}\0".encode())
        for sample in weight_samples(file):
            digest.update(sample)
    return digest.digest()
