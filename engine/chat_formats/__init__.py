"""How models write thoughts and tool calls: reading outputs, rendering history, grammars.

parser          the state machine: text → pieces of messages, thoughts and calls
output_format   what an output may contain; pieces under the caller's names of tools
offered_tools   the tools of a request, and how a model's outputs are written
template_facts  what a chat template shows of a model's formats, found by rendering
rewritten       how much of a turn it writes otherwise in later prompts
kept_facts      that, on disk
call_format     a format of calls as a value, with its parser and what a grammar needs
formats         those that have names; reasoning has those of thoughts
syntax          which formats an output is written in, and how a prompt ends
tool_format     what a format is, and what several share
literals        arguments as in Python
grammar         grammars in a format
history         earlier calls as chat templates want them
thought_end     how a thought is ended that has used up its budget
tools_in_text   tools, calls and results for chat templates that do not show them
system_messages those in the middle, for chat templates that show them elsewhere
contents        joins contents of messages
"""

from penstock.engine.chat_formats.call_format import CallFormat
from penstock.engine.chat_formats.formats import TOOL_FORMATS, tool_format_of
from penstock.engine.chat_formats.grammar import after_thoughts, call_grammar
from penstock.engine.chat_formats.history import template_messages, with_known_effort
from penstock.engine.chat_formats.kept_facts import keep_facts, kept_facts
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
from penstock.engine.chat_formats.reasoning import REASONING_FORMATS, ReasoningFormat
from penstock.engine.chat_formats.syntax import OutputSyntax
from penstock.engine.chat_formats.template_facts import ModelFacts, TemplateFacts, facts_of
from penstock.engine.chat_formats.thought_end import sentence_of, thought_limit
from penstock.engine.chat_formats.tools_in_text import of_request

__all__ = [
    "CUSTOM_INPUT",
    "NAMESPACE_END",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "CallFormat",
    "ModelFacts",
    "ModelFormats",
    "OfferedTools",
    "OutputFormat",
    "OutputItem",
    "OutputParser",
    "OutputReader",
    "OutputSyntax",
    "Piece",
    "ReasoningFormat",
    "TemplateFacts",
    "Tool",
    "ToolMode",
    "after_thoughts",
    "call_grammar",
    "facts_of",
    "items_of",
    "keep_facts",
    "kept_facts",
    "of_request",
    "pieces_after",
    "sentence_of",
    "template_messages",
    "thought_limit",
    "tool_format_of",
    "with_known_effort",
]
