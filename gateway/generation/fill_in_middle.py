"""Prompts of gaps: a text before, a text after, and the tokens by which a model fills what is
between them (`penstock.engine.text.fill_in_middle`).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from penstock.engine.text.fill_in_middle import FillInMiddle
from penstock.gateway.errors import RequestRefusedError
from penstock.gateway.generation.context_limits import GenerationOptions

_SNIPPET = "\n\n--- snippet ---\n\n"  # llama.cpp's, where the model has no token for a file
_PROJECT = "myproject\n"  # llama.cpp's; requests have no names for them
_CURRENT_FILE = "filename\n"
_AFTER_SHARE = 4  # of what is around the gap, a quarter is after it
_OUTPUT_SHARE = 4  # of the context, a quarter is kept free for it, unless it is to be shorter
_Text = str | Sequence[int]


class Tokenise(Protocol):
    """`RequestPlanner.tokenise`."""

    def __call__(
        self,
        text: str,
        *,
        add_special_tokens: bool,
        param: str,
        must_fit: bool,
        num_known_tokens: int = 0,
    ) -> Awaitable[list[int]]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GapPrompt:
    """
    Attributes:
        is_cut: some of the texts around the gap was left out.
    """

    token_ids: Sequence[int]
    is_cut: bool


def ending_there(options: GenerationOptions, fills: FillInMiddle) -> GenerationOptions:
    """The options of an output that ends where another part of the file begins, as a token says."""
    params = options.sampling_params
    if params.ignore_eos:
        return options
    ends = tuple(dict.fromkeys((*params.stop_token_ids, *fills.ends)))
    params = msgspec.structs.replace(params, stop_token_ids=ends)
    return msgspec.structs.replace(options, sampling_params=params)


class GapPrompts:
    """Makes them.

    Args:
        fills: how the model does; None: it does not.
        max_model_len: the context's length. Raises `EngineDeadError`.
    """

    def __init__(
        self, fills: FillInMiddle | None, tokenise: Tokenise, max_model_len: Callable[[], int]
    ) -> None:
        self._fills = fills
        self._tokenise = tokenise
        self._max_model_len = max_model_len

    def require(self, *, param: str) -> FillInMiddle:
        """
        Raises:
            RequestRefusedError: the model does not fill in the middle.
        """
        if self._fills is None:
            raise RequestRefusedError(
                f"{param} needs a model that fills in the middle: this server's has no tokens for "
                "it (such as <|fim_prefix|>, <|fim_suffix|> and <|fim_middle|>)",
                code="unsupported_parameter",
                param=param,
            )
        return self._fills

    async def whole(self, before: _Text, after: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The prompt of a gap, whose texts must fit the context.

        Raises:
            RequestRefusedError: the model does not fill in the middle.
            InvalidRequestError: as `RequestPlanner.tokenise`.
        """
        fills = self.require(param="suffix")
        first = await self._ids(before, "prompt", num_known_tokens=fills.num_tokens)
        second = await self._ids(after, "suffix", num_known_tokens=fills.num_tokens)
        return fills.prompt(first, second, has_start=add_special_tokens)

    async def fitted(
        self,
        before: _Text,
        after: _Text,
        *,
        written: str,
        extra: Sequence[tuple[str, str]],
        num_output_tokens: int | None,
    ) -> GapPrompt:
        """The prompt of texts that are cut to what fits, as llama.cpp does: the beginning of what
        is before the gap, the end of what is after it, and the first of the other files.

        Args:
            written: what is written of the gap so far.
            extra: names and texts of other files.
            num_output_tokens: the output's limit, if the caller sets any.
        """
        fills = self.require(param="input_suffix")
        first = await self._ids(before, "input_prefix")
        second = await self._ids(after, "input_suffix")
        begun = await self._ids(written, "prompt")
        others = await self._files(fills, extra)
        num_tokens = self._max_model_len()
        num_kept_free = num_tokens // _OUTPUT_SHARE
        if num_output_tokens is not None:
            num_kept_free = min(num_kept_free, max(num_output_tokens, 1))
        room = max(num_tokens - num_kept_free - fills.num_tokens - len(begun), 0)
        num_after = min(len(second), max(room // _AFTER_SHARE, room - len(first)))
        num_before = min(len(first), room - num_after)
        num_others = min(len(others), room - num_before - num_after)
        return GapPrompt(
            token_ids=fills.prompt(
                [*first[len(first) - num_before :], *begun],
                second[:num_after],
                context=others[len(others) - num_others :],
            ),
            is_cut=num_before < len(first) or num_after < len(second),
        )

    async def _files(self, fills: FillInMiddle, extra: Sequence[tuple[str, str]]) -> Sequence[int]:
        """What comes before the gap's own file."""
        if not extra:
            return []
        ids: list[int] = []
        if fills.repository is not None:
            ids += [fills.repository, *await self._ids(_PROJECT, "input_extra")]
        for number, (name, text) in enumerate(extra):
            param = f"input_extra[{number}]"
            if fills.file is None:
                ids += await self._ids(_SNIPPET, param)
            else:
                ids += [fills.file, *await self._ids(f"{name}\n", param)]
            ids += await self._ids(text, param)
        if fills.file is not None:
            ids += [fills.file, *await self._ids(_CURRENT_FILE, "input_extra")]
        return ids

    async def _ids(
        self, text: _Text, param: str, *, num_known_tokens: int | None = None
    ) -> Sequence[int]:
        """
        Args:
            num_known_tokens: before a text that must fit the context; None: it need not.
        """
        if not isinstance(text, str):
            return text
        if not text:
            return []
        return await self._tokenise(
            text,
            add_special_tokens=False,
            param=param,
            must_fit=num_known_tokens is not None,
            num_known_tokens=num_known_tokens or 0,
        )
