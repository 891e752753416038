"""The requests of `POST /classify`, in vLLM's format."""

from __future__ import annotations

from penstock.gateway.api.embeddings.schema import PooledChat, PooledTexts


class ClassifyRequest(PooledTexts):
    """Texts, or their token ids."""


class ClassifyChatRequest(PooledChat):
    """One conversation."""
