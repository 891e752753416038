"""Text to token ids and back; runs in the gateway (or in `LLM`), never in the core."""

from penstock.engine.text.chat_template import ChatTemplate
from penstock.engine.text.detokenizer import OutputText, TextDelta, with_special_stops
from penstock.engine.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "OutputText", "TextDelta", "Tokenizer", "with_special_stops"]
