"""Recently tokenised prompts. When a client sends the whole conversation every turn, only the new
part is tokenised.

Each tenant has its own memory, so that response times reveal nothing about other tenants' prompts.
The total is bounded (16 MiB of ids); it is only a cache, so there is no flag for it.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from penstock.engine.text import Tokenizer
from penstock.gateway.storage.conversations.prompt_ids import Reused, rendering_of, reuse_any
from penstock.gateway.storage.conversations.records import Rendering

MIN_KNOWN_CHARS = 1024  # tokenising a shorter prompt is faster than finding it
_MAX_PROMPTS = 128  # of a tenant
_MAX_TENANTS = 64
_MAX_TOKENS = 4 << 20  # in total; four bytes each
_Prompts = OrderedDict[Rendering, "array[int]"]


class PromptMemory:
    """Evicts the least recently used prompts first."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tenants: OrderedDict[str, _Prompts] = OrderedDict()
        self.num_tokens = 0

    def search(self, tenant: str) -> Callable[[str], Reused]:
        """A function that finds the longest prefix of a text whose ids are known, and the rest. It
        uses a snapshot, so it may run in a thread."""
        prompts = self._tenants.get(tenant, _Prompts())
        known = [(rendering, (token_ids,)) for rendering, token_ids in prompts.items()]

        def find(text: str) -> Reused:
            if not known or len(text) < MIN_KNOWN_CHARS:
                return Reused((), text)
            return reuse_any(text, known, self._tokenizer)

        return find

    def remember(self, tenant: str, text: str, token_ids: Sequence[int]) -> None:
        """Remember a prompt that was tokenised."""
        if len(text) < MIN_KNOWN_CHARS or len(token_ids) > _MAX_TOKENS // 4:
            return
        prompts = self._tenants.setdefault(tenant, OrderedDict())
        self._tenants.move_to_end(tenant)
        rendering = rendering_of(text)
        self._forget(prompts, rendering)
        prompts[rendering] = array("I", token_ids)
        self.num_tokens += len(token_ids)
        if len(prompts) > _MAX_PROMPTS:
            self._forget(prompts, next(iter(prompts)))
        while self.num_tokens > _MAX_TOKENS or len(self._tenants) > _MAX_TENANTS:
            oldest, theirs = next(iter(self._tenants.items()))
            self._forget(theirs, next(iter(theirs)))
            if not theirs or len(self._tenants) > _MAX_TENANTS:
                self.num_tokens -= sum(map(len, theirs.values()))
                del self._tenants[oldest]

    def _forget(self, prompts: _Prompts, rendering: Rendering) -> None:
        self.num_tokens -= len(prompts.pop(rendering, ()))
