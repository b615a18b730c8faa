"""Chat templates of the tiny tokenizer that know tools, and one that opens the reasoning."""

TOOL_TEMPLATE = (
    "{%- if tools -%}<|system|>{% for tool in tools %}{{ tool.function | tojson }}{% endfor %}<|end|>{%- endif -%}"
    "{%- for message in messages -%}<|{{ message.role }}|>{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] -%}"
    "{%- for key, value in call.function.arguments.items() -%}{{ key }} is {{ value }}{%- endfor -%}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>"
    "{%- endfor -%}<|end|>{%- endfor -%}{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
THINKING_TEMPLATE = (
    TOOL_TEMPLATE.replace("<|assistant|>{%- endif", "<|assistant|><think>{%- endif") + "{#- </think> -#}"
)
