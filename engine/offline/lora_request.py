"""The adapters of offline calls: `LLM.generate(…, lora_request=LoRARequest(name=…, path=…))`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from penstock.engine.config import LoraConfig
from penstock.engine.engine_core import EngineCore
from penstock.engine.errors import InvalidRequestError, ModelLoadError
from penstock.engine.lora.files import CONFIG_FILE, WEIGHTS_FILE, find_adapter
from penstock.engine.request import Adapter


class LoRARequest:
    """An adapter by its directory, in our form or in vLLM's.

    LoRARequest(name="sql", path="/adapters/sql")
    LoRARequest("sql", 1, "/adapters/sql")

    Args:
        lora_int_id: vLLM's; adapters are told apart by their content here.
    """

    __slots__ = ("name", "path")

    def __init__(
        self,
        lora_name: str | None = None,
        lora_int_id: int | None = None,  # noqa: ARG002 (vLLM's)
        lora_path: str | os.PathLike[str] | None = None,
        *,
        name: str | None = None,
        path: str | os.PathLike[str] | None = None,
    ) -> None:
        found_name, found_path = name or lora_name, path or lora_path
        if not found_name or not isinstance(found_name, str) or not found_path:
            raise InvalidRequestError("LoRARequest needs a name and a path", param="lora_request")
        self.name, self.path = found_name, os.fspath(found_path)

    def __repr__(self) -> str:
        return f"LoRARequest(name={self.name!r}, path={self.path!r})"


LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class AdapterFinder:
    """Finds and reads the adapters of calls."""

    def __init__(self, config: LoraConfig, core: EngineCore) -> None:
        self._config, self._core = config, core
        self._known: dict[tuple[object, ...], Adapter] = {}  # by path and times of its files

    def find(self, requests: LoRARequests, num_prompts: int) -> list[Adapter | None]:
        """The adapter of each prompt.

        Raises:
            InvalidRequestError: one cannot be used.
        """
        several = [requests] * num_prompts if isinstance(requests, LoRARequest) else requests
        if several is None:
            return [None] * num_prompts
        if not isinstance(several, list | tuple) or not all(
            each is None or isinstance(each, LoRARequest) for each in several
        ):
            raise InvalidRequestError(
                "lora_request must be a LoRARequest or a list of them", param="lora_request"
            )
        if len(several) != num_prompts:
            raise InvalidRequestError(
                f"{len(several)} adapters for {num_prompts} prompts", param="lora_request"
            )
        if not self._config.enable_lora and any(several):
            raise InvalidRequestError(
                "lora_request needs LLM(enable_lora=True)", param="lora_request"
            )
        found = {each: self._find(each) for each in several if each is not None}
        return [None if each is None else found[each] for each in several]

    def _find(self, request: LoRARequest) -> Adapter:
        try:
            key = (request.name, request.path, *_times(Path(request.path)))
            if key not in self._known:
                self._known[key] = find_adapter(
                    request.name,
                    request.path,
                    max_rank=self._config.max_lora_rank,
                    max_bytes=self._core.adapters.max_bytes,
                )
            self._core.preparation.load(self._core.adapters.need(self._known[key]))
        except (InvalidRequestError, ModelLoadError) as error:
            raise InvalidRequestError(str(error), param="lora_request") from error
        return self._known[key]


def _times(path: Path) -> list[tuple[int, int]]:
    files = [path / name for name in (CONFIG_FILE, WEIGHTS_FILE)]
    return [(file.stat().st_mtime_ns, file.stat().st_size) for file in files if file.is_file()]
