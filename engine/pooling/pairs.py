"""Two texts, a query and a document, as the prompt of a model that scores them."""

from __future__ import annotations

from penstock.engine.errors import PromptTooLongError
from penstock.engine.pooling.settings import PairFormat
from penstock.engine.text.tokenizer import Tokenizer

# Of Qwen3-Reranker's model card; the three parts are tokenised apart.
DEFAULT_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
_BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
_AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class PairPrompts:
    """Makes prompts of pairs. Threads may share it."""

    def __init__(self, tokenizer: Tokenizer, pair_format: PairFormat) -> None:
        self._tokenizer = tokenizer
        self._is_yes_no = pair_format == "yes_no"
        self._before: list[int] = []
        self._after: list[int] = []
        if self._is_yes_no:
            self._before = tokenizer.encode(_BEFORE, add_special_tokens=False)
            self._after = tokenizer.encode(_AFTER, add_special_tokens=False)

    def prompt(
        self,
        query: str,
        document: str,
        *,
        instruction: str | None = None,
        max_tokens: int | None = None,
        param: str | None = None,
    ) -> tuple[list[int], int]:
        """The token ids, and how many belong to the query (0 if the model does not care).

        Args:
            instruction: of a model that judges: what makes a document a good one.
            max_tokens: the end of the document is cut off beyond them; None: nothing is.
            param: the parameter that the document came from.

        Raises:
            InvalidRequestError: a text cannot be tokenised.
            PromptTooLongError: `max_tokens` leaves no room for the document.
        """
        if not self._is_yes_no:
            return self._tokenizer.encode_pair(query, document, max_tokens=max_tokens, param=param)
        text = f"<Instruct>: {instruction or DEFAULT_INSTRUCTION}\n<Query>: {query}\n<Document>: "
        room = None
        if max_tokens is not None:
            room = max_tokens - len(self._before) - len(self._after)
            if room < 1:
                raise PromptTooLongError(
                    f"{max_tokens} tokens leave no room for the texts", param=param
                )
        middle = self._tokenizer.encode(text + document, add_special_tokens=False, param=param)
        return [*self._before, *middle[:room], *self._after], 0
