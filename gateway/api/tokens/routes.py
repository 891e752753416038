"""`POST /tokenize` and `/detokenize`, in vLLM's format: a text or a chat to token ids, and back;
`GET /tokenizer_info`: the tokenizer's configuration."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from penstock.engine.errors import InvalidRequestError
from penstock.engine.model_files.json_file import is_present, read_json
from penstock.gateway.api.chat.schema import chat_prompt, image_sources
from penstock.gateway.api.schema.parsing import parse_fields
from penstock.gateway.api.shared.json_api import json_response, parsed, read_fields
from penstock.gateway.api.shared.operations import operation
from penstock.gateway.api.tokens.schema import Detokenize, TokenizeChat, TokenizePrompt
from penstock.gateway.auth.callers import caller_of
from penstock.gateway.engines.engine_pool import EnginePool
from penstock.gateway.generation.request_planner import RequestPlanner

_MANY_TOKENS = 16 << 10  # from here on a loop over all tokens would stall the event loop


class Tokens:
    """The endpoints."""

    def __init__(self, planner: RequestPlanner, engine: EnginePool, *, max_body_bytes: int) -> None:
        self._planner = planner
        self._engine = engine
        self._max_body_bytes = max_body_bytes

    @operation(
        "POST /tokenize",
        "Tokenize a text or a chat.",
        "Tokens",
        body=(TokenizePrompt, TokenizeChat),
        statuses=(404,),
        next_bodies={"POST /detokenize": {"tokens": "$response.body#/tokens"}},
    )
    async def tokenize(self, request: Request) -> Response:
        body = await self._body(request)
        asked: TokenizeChat | TokenizePrompt
        if "messages" in body:
            asked = await parsed(self._planner.paced_work, TokenizeChat, body, parse_fields)
        else:
            asked = parse_fields(TokenizePrompt, body)
        await self._planner.adapters.require(asked.model, caller_of(request.scope))
        max_model_len = self._engine.info_for_running().max_model_len
        token_ids = await self._token_ids(asked)
        return json_response(
            {
                "count": len(token_ids),
                "max_model_len": max_model_len,
                "tokens": token_ids,
                "token_strs": await self._pieces(token_ids) if asked.return_token_strs else None,
            }
        )

    @operation(
        "POST /detokenize",
        "Convert token ids to text.",
        "Text",
        body=(Detokenize,),
        statuses=(404,),
    )
    async def detokenize(self, request: Request) -> Response:
        asked = parse_fields(Detokenize, await self._body(request))
        await self._planner.adapters.require(asked.model, caller_of(request.scope))
        piece = self._planner.model.tokenizer.token_piece
        unknown = next((i for i in set(asked.tokens) if piece(i) is None), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"token id {unknown} is not in the vocabulary", param="tokens"
            )
        text = await self._planner.detokenise(asked.tokens, skip_special_tokens=False)
        return json_response({"prompt": text})

    @operation("GET /tokenizer_info", "The tokenizer's configuration.", "TokenizerInfo")
    async def tokenizer_info(self, _: Request) -> Response:
        """`tokenizer_config.json`, with the chat template that is used."""
        model = self._planner.model
        file = model.directory / "tokenizer_config.json"
        config = await asyncio.to_thread(read_json, file) if is_present(file) else {}
        for name, value in (
            ("tokenizer_class", config.get("tokenizer_class") or "PreTrainedTokenizerFast"),
            ("chat_template", model.chat_template.source),
        ):
            config[name] = value
        return json_response(config)

    async def _pieces(self, token_ids: Sequence[int]) -> list[str | None]:
        pieces = map(self._planner.model.tokenizer.token_piece, token_ids)
        return await self._planner.long_work.run(
            lambda: list(pieces), is_long=len(token_ids) >= _MANY_TOKENS
        )

    async def _body(self, request: Request) -> dict[str, Any]:
        return await read_fields(request, max_bytes=self._max_body_bytes)

    async def _token_ids(self, asked: TokenizeChat | TokenizePrompt) -> Sequence[int]:
        if isinstance(asked, TokenizePrompt):
            return await self._planner.tokenise(
                asked.prompt,
                add_special_tokens=asked.add_special_tokens,
                param="prompt",
                must_fit=False,
            )
        images = await self._planner.images.load(image_sources(asked.messages))
        return await self._planner.tokenise_chat(
            await self._planner.render_chat(chat_prompt(asked, images)),
            add_special_tokens=asked.add_special_tokens,
            must_fit=False,
        )
