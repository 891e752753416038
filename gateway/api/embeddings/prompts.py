"""The prompts of requests for vectors and labels: of texts, token ids, or one conversation."""

from __future__ import annotations

from penstock.gateway.api.chat.schema import chat_prompt, image_sources
from penstock.gateway.api.embeddings.schema import PooledChat, PooledTexts
from penstock.gateway.generation.pooled import Embedder, PooledPrompt
from penstock.gateway.generation.request_planner import RequestPlanner


class PooledPrompts:
    """Makes them.

    Args:
        planner: renders conversations.
    """

    def __init__(self, embedder: Embedder, planner: RequestPlanner) -> None:
        self._embedder = embedder
        self._planner = planner

    async def of(self, asked: PooledTexts | PooledChat) -> list[PooledPrompt]:
        """The prompts of a request.

        Raises:
            InvalidRequestError: a text cannot be tokenised, or the template refuses the messages.
            PromptTooLongError: a text is longer than the context.
        """
        if isinstance(asked, PooledChat):
            return [await self._of_chat(asked)]
        inputs = asked.inputs
        texts = [(name, text) for name, text in inputs if isinstance(text, str)]
        if texts:
            return await self._embedder.tokenise_each(
                texts,
                add_special_tokens=asked.add_special_tokens,
                truncate=asked.max_tokens,
            )
        max_tokens = asked.max_tokens(self._embedder.max_model_len())
        return [
            PooledPrompt(token_ids[:max_tokens], param=name)
            for name, token_ids in inputs
            if not isinstance(token_ids, str)
        ]

    async def _of_chat(self, asked: PooledChat) -> PooledPrompt:
        planner = self._planner
        images = await planner.images.load(image_sources(asked.messages))
        token_ids = await planner.tokenise(
            await planner.render_chat(chat_prompt(asked, images)),
            add_special_tokens=asked.add_special_tokens,
            param="messages",
            must_fit=asked.truncate_prompt_tokens is None,
        )
        max_tokens = asked.max_tokens(self._embedder.max_model_len())
        return PooledPrompt(
            token_ids[:max_tokens],
            param="messages",
            images=planner.images.located(token_ids, images, param="messages"),
        )
