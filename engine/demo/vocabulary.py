"""The tokenizer: byte-level BPE with digits apart, and the files that describe it."""

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.engine.demo.corpus import BEGIN, END, SPECIAL_TOKENS

VOCAB_SIZE = 1024
# Letters with the space before them, single digits, signs, white space: as in GPT-2 but for digits.
PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Tools are listed by their names and parameters only: whole schemas would fill the context. Calls
# and results are Hermes'. Where thoughts are asked for, the prompt begins them.
CHAT_TEMPLATE = (
    "{% set thinks = enable_thinking if enable_thinking is defined else "
    "(reasoning_effort is defined and reasoning_effort not in (none, 'none')) %}"
    "{% set block = namespace(lines=[]) %}"
    "{% if tools %}{% set listed = namespace(tools=[]) %}{% for tool in tools %}"
    "{% set function = tool.function if tool.function is defined else tool %}"
    "{% set names = ((function.parameters or {}).properties or {}) | list | join(', ') %}"
    "{% set listed.tools = listed.tools + [function.name ~ '(' ~ names ~ ')'] %}{% endfor %}"
    "{% set block.lines = ['Tools: ' ~ listed.tools | join(', ')] %}{% endif %}"
    "{% if thinks %}{% set block.lines = block.lines + ['Think first.'] %}{% endif %}"
    "{{ bos_token }}"
    "{% if block.lines and messages[0].role not in ('system', 'developer') %}"
    "<|system|>{{ block.lines | join('\n') }}<|end|>{% endif %}"
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}<|user|>{% else %}{{ '\n' }}{% endif %}"
    "{{ '<tool_response>\n' }}"
    "{% elif message.role in ('system', 'developer') %}<|system|>"
    "{% elif message.role == 'assistant' %}<|assistant|>"
    "{% if thinks and message.reasoning_content %}"
    "{{ '<think>\n' ~ message.reasoning_content | trim ~ '\n</think>\n\n' }}{% endif %}"
    "{% else %}<|user|>{% endif %}"
    "{% if message.content is string %}{{ message.content | trim }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text | default('') | trim }}"
    "{% endfor %}{% endif %}"
    "{% if loop.first and block.lines and message.role in ('system', 'developer') %}"
    "{{ '\n' ~ block.lines | join('\n') }}{% endif %}"
    "{% for call in message.tool_calls or [] %}"
    "{% set function = call.function if call.function is defined else call %}"
    "{% if message.content or not loop.first %}{{ '\n' }}{% endif %}"
    '{{ \'<tool_call>\n{"name": "\' ~ function.name ~ \'", "arguments": \' }}'
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{ '}\n</tool_call>' }}{% endfor %}"
    "{% if message.role != 'tool' %}<|end|>{% else %}{{ '\n</tool_response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}<|end|>{% endif %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinks %}{{ '<think>\n' }}{% endif %}"
    "{% endif %}"
)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Learn merges from texts; the 256 bytes and the special tokens are always included."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, max_tokens: int) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": END,
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
