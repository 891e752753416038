"""`POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`, for admins.

Each call leaves a line in the audit log, refused ones too.
"""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.errors import ModelLoadError
from penstock.engine.lora.files import find_adapter
from penstock.engine.request import Adapter, FinishReason, SamplingParams
from penstock.engine.request import Request as EngineRequest
from penstock.gateway.api.adapters.schema import LoadAdapter, UnloadAdapter
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.json_api import read_json
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.auth.callers import ANYBODY, audited
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.adapters import AdapterRegistry
from penstock.gateway.generation.served_model import ServedModel

_NUM_READING = 2  # adapters at once, of which each takes a thread
_TRIAL_S = 30.0  # all places may be taken; then the adapter is read when it is first used


class Adapters:
    """
    Args:
        max_rank: of an adapter (`--max-lora-rank`).
    """

    def __init__(
        self,
        registry: AdapterRegistry,
        engine: EnginePool,
        model: ServedModel,
        *,
        max_rank: int,
        max_body_bytes: int,
    ) -> None:
        self._registry, self._engine, self._model = registry, engine, model
        self._max_rank, self._max_body_bytes = max_rank, max_body_bytes
        self._lock = asyncio.Lock()
        self._reading = asyncio.Semaphore(_NUM_READING)

    @operation(
        "POST /v1/load_lora_adapter",
        "Load an adapter, which becomes a model.",
        body=(LoadAdapter,),
        statuses=(403, 404, 503),
    )
    async def load(self, request: Request) -> Response:
        """The engine has read it when this returns, so what is wrong with it is in the answer."""
        with audited(request.scope, "load_lora_adapter") as what:
            asked = parse_fields(
                LoadAdapter, await read_json(request, max_bytes=self._max_body_bytes)
            )
            what.update(lora_name=asked.lora_name, lora_path=asked.lora_path)
            self._check_name(asked)
            async with self._reading:
                adapter = await self._find(asked)
            async with self._lock:
                self._check_name(asked)
                await self._try(adapter)
                await self._registry.load(adapter)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    @operation(
        "POST /v1/unload_lora_adapter",
        "Unload an adapter; its streams end.",
        body=(UnloadAdapter,),
        statuses=(403, 404, 503),
    )
    async def unload(self, request: Request) -> Response:
        with audited(request.scope, "unload_lora_adapter") as what:
            asked = parse_fields(
                UnloadAdapter, await read_json(request, max_bytes=self._max_body_bytes)
            )
            what.update(lora_name=asked.lora_name)
            async with self._lock:
                await self._registry.require(asked.lora_name, ANYBODY)
                if asked.lora_name in self._model.names:
                    raise _refused("lora_name", f"{asked.lora_name!r} is the base model")
                # Though any name is the base model's.
                if self._registry.known(asked.lora_name) is None:
                    raise self._model.not_found(asked.lora_name, tuple(self._registry.of(ANYBODY)))
                await self._registry.unload(asked.lora_name)
        return Response(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    def _check_name(self, asked: LoadAdapter) -> None:
        name = asked.lora_name
        if name in self._model.names:
            raise _refused("lora_name", f"{name!r} is the base model")
        if name in self._registry.of(ANYBODY) and not asked.load_inplace:
            raise _refused(
                "lora_name", f"{name!r} is loaded already; load_inplace: true replaces it"
            )

    async def _find(self, asked: LoadAdapter) -> Adapter:
        info = await self._engine.require_info()
        try:
            return await asyncio.to_thread(
                find_adapter,
                asked.lora_name,
                asked.lora_path,
                max_rank=self._max_rank,
                max_bytes=info.max_adapter_bytes or None,
            )
        except ModelLoadError as error:
            raise _refused("lora_path", str(error)) from error

    async def _try(self, adapter: Adapter) -> None:
        """Have the engine read the adapter, for a request without output."""
        await self._engine.require_info()
        stream = self._engine.submit(
            EngineRequest(
                request_id=f"adapter-{uuid.uuid4().hex}",
                prompt_token_ids=(0,),
                sampling_params=SamplingParams(max_tokens=0),
                adapter=adapter,
            )
        )
        is_ready = asyncio.Event()
        try:
            async with asyncio.timeout(_TRIAL_S):
                while not stream.is_over:
                    if stream.when_ready(is_ready.set):
                        await is_ready.wait()
                        is_ready.clear()
                    for output in stream.take():
                        if output.finish_reason is FinishReason.ERROR:
                            raise _refused("lora_path", output.error or "it cannot be loaded")
        except TimeoutError:
            return
        finally:
            self._engine.abort(stream)


def _refused(param: str, message: str) -> RequestRefusedError:
    return RequestRefusedError(f"{param}: {message}", code="invalid_value", param=param)
