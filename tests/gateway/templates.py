"""Chat templates in the manner of the model families, over the special tokens of the tests' tokenizer."""

# Tools in the system message, calls in tags, thinking that a variable switches.
THINKING_TOOLS = """\
{%- if tools %}<|start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}<tools>
{% for tool in tools %}
{{ tool | tojson }}
{% endfor %}
</tools><|end|>
{% elif messages[0].role == 'system' %}<|start|>system
{{ messages[0].content }}<|end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}<|start|>assistant
{% if message.reasoning_content and loop.last %}<think>
{{ message.reasoning_content.strip() }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|end|>
{% elif message.role == 'tool' %}<|start|>tool
{{ message.content }}<|end|>
{% elif message.role != 'system' %}<|start|>{{ message.role }}
{{ message.content | trim }}<|end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""

# Begins every answer within the thinking, and has no switch.
ALWAYS_THINKING = """\
{%- for message in messages %}<|start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant
<think>
{% endif %}"""

# No system message, and the roles must take turns.
STRICT = """\
{%- for message in messages %}
{%- if message.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif -%}
<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endfor %}
{%- if add_generation_prompt %}<|start|>model
{% endif %}"""

# One call a message, its arguments called parameters.
ONE_CALL = """\
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif -%}
<|start|>assistant
{"name": "{{ message.tool_calls[0].function.name }}", "parameters": {{ message.tool_calls[0].function.arguments | tojson }}}<|end|>
{% else %}<|start|>{{ message.role }}
{{ message.content }}<|end|>
{% endif %}
{%- endfor %}
{%- if tools %}python_tag{% endif %}
{%- if add_generation_prompt %}<|start|>assistant
{% endif %}"""  # noqa: E501

# Nine letters and digits to an id.
SHORT_IDS = """\
{%- for message in messages %}
{%- for call in message.tool_calls or [] %}
{%- if call.id | length != 9 %}{{ raise_exception('ids of length 9') }}{% endif %}[TOOL_CALLS]{{ call.id }}
{%- endfor %}
{%- if message.role == 'tool' %}[TOOL_RESULTS]{{ message.tool_call_id }}{% endif %}{{ message.content }}<|end|>
{%- endfor %}{% if tools %}!{% endif %}"""
