"""How models write thoughts and tool calls: reading outputs, rendering history, grammars.

parser          the state machine: text → pieces of messages, thoughts and calls
output_format   what an output may contain; pieces under the caller's names of tools
offered_tools   the tools of a request, and how a model's outputs are written
syntax          which formats a model writes in, and how a prompt ends
tool_format     what a format is; formats/ has a module for each
grammar         grammars in a format
history         earlier calls as chat templates want them
tools_in_text   tools, calls and results for chat templates that do not show them
"""

from penstock.engine.chat_formats.formats import TOOL_FORMATS
from penstock.engine.chat_formats.grammar import after_thoughts, call_grammar
from penstock.engine.chat_formats.history import template_messages, template_variables
from penstock.engine.chat_formats.offered_tools import ModelFormats, OfferedTools, ToolMode
from penstock.engine.chat_formats.output_format import (
    CUSTOM_INPUT,
    NAMESPACE_END,
    OutputFormat,
    OutputItem,
    OutputReader,
    items_of,
    pieces_after,
)
from penstock.engine.chat_formats.parser import OutputParser, Piece, Tool
from penstock.engine.chat_formats.syntax import REASONING_FORMATS, OutputSyntax, formats_of

__all__ = [
    "CUSTOM_INPUT",
    "NAMESPACE_END",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "ModelFormats",
    "OfferedTools",
    "OutputFormat",
    "OutputItem",
    "OutputParser",
    "OutputReader",
    "OutputSyntax",
    "Piece",
    "Tool",
    "ToolMode",
    "after_thoughts",
    "call_grammar",
    "formats_of",
    "items_of",
    "pieces_after",
    "template_messages",
    "template_variables",
]
