"""Chat templates as their models publish them, by model; some are shortened where nothing here
depends on it."""

from __future__ import annotations

TEMPLATES = {
    "smollm2": (
        "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
        "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
        "Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "chatml": (
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + "
        "message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "zephyr": (
        "{% for message in messages %}\n{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + "
        "message['content'] + eos_token }}\n{% elif message['role'] == 'system' %}\n"
        "{{ '<|system|>\n' + message['content'] + eos_token }}\n"
        "{% elif message['role'] == 'assistant' %}\n{{ '<|assistant|>\n'  + message['content'] + "
        "eos_token }}\n{% endif %}\n{% if loop.last and add_generation_prompt %}\n"
        "{{ '<|assistant|>' }}\n{% endif %}\n{% endfor %}"
    ),
    "llama-2": (
        "{% if messages[0]['role'] == 'system' %}{% set loop_messages = messages[1:] %}"
        "{% set system_message = messages[0]['content'] %}{% else %}"
        "{% set loop_messages = messages %}{% set system_message = false %}{% endif %}"
        "{% for message in loop_messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...')"
        " }}{% endif %}{% if loop.index0 == 0 and system_message != false %}"
        "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + "
        "message['content'] %}{% else %}{% set content = message['content'] %}{% endif %}"
        "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + "
        "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' '  + content.strip() + ' ' + "
        "eos_token }}{% endif %}{% endfor %}"
    ),
    "mistral-0.1": (
        "{{ bos_token }}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...')"
        " }}{% endif %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + "
        "' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token "
        "}}{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
        "{% endif %}{% endfor %}"
    ),
    "gemma-2": (
        "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role "
        "not supported') }}{% endif %}{% for message in messages %}"
        "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...')"
        " }}{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}"
        "{% else %}{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' "
        "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"
    ),
    "phi-3": (
        "{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + "
        "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + "
        "message['content'] + '<|end|>\n'}}{% elif message['role'] == 'assistant' %}"
        "{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
    ),
    "phi-4-mini": (
        "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message "
        "and message['tools'] is not none %}{{ '<|' + message['role'] + '|>' + "
        "message['content'] + '<|tool|>' + message['tools'] + '<|/tool|>' + '<|end|>' }}"
        "{% else %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}"
        "{{ eos_token }}{% endif %}"
    ),
    "llama-3": (
        "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = "
        "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | "
        "trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}"
        "{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
    ),
    # Shows calls where the content is null, and results, but no tools.
    "deepseek-r1": (
        "{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}"
        "{% endif %}{% set ns = namespace(is_first=false, is_tool=false, is_output_first=true, "
        "system_prompt='') %}{%- for message in messages %}{%- if message['role'] == 'system' %}"
        "{% set ns.system_prompt = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}"
        "{{ns.system_prompt}}{%- for message in messages %}{%- if message['role'] == 'user' %}"
        "{%- set ns.is_tool = false -%}{{'<｜User｜>' + message['content']}}{%- endif %}"
        "{%- if message['role'] == 'assistant' and message['content'] is none %}"
        "{%- set ns.is_tool = false -%}{%- for tool in message['tool_calls']%}"
        "{%- if not ns.is_first %}{{'<｜Assistant｜><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + "
        "tool['type'] + '<｜tool▁sep｜>' + tool['function']['name'] + '\\n' + '```json' + '\\n' + "
        "tool['function']['arguments'] + '\\n' + '```' + '<｜tool▁call▁end｜>'}}"
        "{%- set ns.is_first = true -%}{%- endif %}{%- endfor %}{{'<｜tool▁calls▁end｜>"
        "<｜end▁of▁sentence｜>'}}{%- endif %}{%- if message['role'] == 'assistant' and "
        "message['content'] is not none %}{%- if ns.is_tool %}{{'<｜tool▁outputs▁end｜>' + "
        "message['content'] + '<｜end▁of▁sentence｜>'}}{%- set ns.is_tool = false -%}{%- else %}"
        "{% set content = message['content'] %}{{'<｜Assistant｜>' + content + "
        "'<｜end▁of▁sentence｜>'}}{%- endif %}{%- endif %}{%- if message['role'] == 'tool' %}"
        "{%- set ns.is_tool = true -%}{%- if ns.is_output_first %}{{'<｜tool▁outputs▁begin｜>"
        "<｜tool▁output▁begin｜>' + message['content'] + '<｜tool▁output▁end｜>'}}"
        "{%- set ns.is_output_first = false %}{%- else %}{{'\\n<｜tool▁output▁begin｜>' + "
        "message['content'] + '<｜tool▁output▁end｜>'}}{%- endif %}{%- endif %}{%- endfor -%}"
        "{% if ns.is_tool %}{{'<｜tool▁outputs▁end｜>'}}{% endif %}{% if add_generation_prompt and "
        "not ns.is_tool %}{{'<｜Assistant｜><think>\\n'}}{% endif %}"
    ),
    "qwen2.5": (
        "{%- if tools %}\n    {{- '<|im_start|>system\\n' }}\n"
        "    {%- if messages[0]['role'] == 'system' %}\n        {{- messages[0]['content'] }}\n"
        "    {%- else %}\n        {{- 'You are Qwen, created by Alibaba Cloud. You are a helpful "
        "assistant.' }}\n    {%- endif %}\n"
        '    {{- "\\n\\n# Tools\\n\\nYou may call one or more functions to assist with the user '
        "query.\\n\\nYou are provided with function signatures within <tools></tools> XML tags:"
        '\\n<tools>" }}\n    {%- for tool in tools %}\n        {{- "\\n" }}\n'
        "        {{- tool | tojson }}\n    {%- endfor %}\n"
        '    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name '
        "and arguments within <tool_call></tool_call> XML tags:\\n<tool_call>\\n"
        '{\\"name\\": <function-name>, \\"arguments\\": <args-json-object>}\\n</tool_call>'
        "<|im_end|>\\n\" }}\n{%- else %}\n    {%- if messages[0]['role'] == 'system' %}\n"
        "        {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}\n"
        "    {%- else %}\n        {{- '<|im_start|>system\\nYou are Qwen, created by Alibaba "
        "Cloud. You are a helpful assistant.<|im_end|>\\n' }}\n    {%- endif %}\n{%- endif %}\n"
        '{%- for message in messages %}\n    {%- if (message.role == "user") or (message.role == '
        '"system" and not loop.first) or (message.role == "assistant" and not '
        "message.tool_calls) %}\n        {{- '<|im_start|>' + message.role + '\\n' + "
        "message.content + '<|im_end|>' + '\\n' }}\n    {%- elif message.role == \"assistant\" "
        "%}\n        {{- '<|im_start|>' + message.role }}\n        {%- if message.content %}\n"
        "            {{- '\\n' + message.content }}\n        {%- endif %}\n"
        "        {%- for tool_call in message.tool_calls %}\n"
        "            {%- if tool_call.function is defined %}\n"
        "                {%- set tool_call = tool_call.function %}\n            {%- endif %}\n"
        '            {{- \'\\n<tool_call>\\n{"name": "\' }}\n            {{- tool_call.name }}\n'
        '            {{- \'", "arguments": \' }}\n            {{- tool_call.arguments | tojson }}\n'
        "            {{- '}\\n</tool_call>' }}\n        {%- endfor %}\n"
        "        {{- '<|im_end|>\\n' }}\n    {%- elif message.role == \"tool\" %}\n"
        '        {%- if (loop.index0 == 0) or (messages[loop.index0 - 1].role != "tool") %}\n'
        "            {{- '<|im_start|>user' }}\n        {%- endif %}\n"
        "        {{- '\\n<tool_response>\\n' }}\n        {{- message.content }}\n"
        "        {{- '\\n</tool_response>' }}\n        {%- if loop.last or (messages[loop.index0 + "
        "1].role != \"tool\") %}\n            {{- '<|im_end|>\\n' }}\n        {%- endif %}\n"
        "    {%- endif %}\n{%- endfor %}\n{%- if add_generation_prompt %}\n"
        "    {{- '<|im_start|>assistant\\n' }}\n{%- endif %}\n"
    ),
    # Insists on alternating roles, and on ids of nine letters and digits.
    "mistral-0.3": (
        "{{ bos_token }}{% set user_messages = messages | selectattr('role', 'equalto', 'user') | "
        "list %}{% for message in messages %}{% if message['role'] == 'user' %}{% if tools and "
        "message == user_messages[-1] %}{{ '[AVAILABLE_TOOLS] ' + tools | tojson + "
        "'[/AVAILABLE_TOOLS]' }}{% endif %}{{ '[INST] ' + message['content'] + '[/INST]' }}"
        "{% elif message['tool_calls'] is defined and message['tool_calls'] %}{{ '[TOOL_CALLS] [' "
        "}}{% for call in message['tool_calls'] %}{% if call['id'] | length != 9 %}"
        "{{ raise_exception('Tool call IDs should be alphanumeric strings with length 9!') }}"
        "{% endif %}{{ call['function'] | tojson }}{{ ', ' if not loop.last else '' }}{% endfor %}"
        "{{ ']' + eos_token }}{% elif message['role'] == 'assistant' %}{{ ' ' + "
        "message['content'] + eos_token }}{% elif message['role'] == 'tool' %}"
        "{{ '[TOOL_RESULTS] ' + message['content'] + '[/TOOL_RESULTS]' }}{% else %}"
        "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}"
        "{% endfor %}"
    ),
}
