"""Chat templates of the forms that model families use, for a tokenizer of bytes with their special tokens."""

from functools import cache

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerFast

from tests.start_tokenizer import build_tokenizer

CALLS = "{% if m.tool_calls %}{% for c in m.tool_calls %}"
HERMES = (
    "{% if tools %}<|im_start|>system\nTools: {{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    + CALLS
    + '\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}{% endif %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}<think>{{ m.reasoning_content or '' }}</think>{% endif %}"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
BRACKETS = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'system' %}<<SYS>>{{ m.content }}<</SYS>>"
    "{% elif m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}"
    "{% endif %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}{{ m.content }}" + CALLS + "[CALL]{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% endif %}<|im_end|>{% endif %}{% endfor %}"
)
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}!{{ c.function.arguments.word }}{% endfor %}{% endif %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)
COUNTING = (
    "{% for m in messages %}<|im_start|>{{ loop.index }}{{ m.role }}{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{{ messages | length }}{% endif %}"
)
NO_TOOLS = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
APPENDING = {"hermes": HERMES, "thinking": THINKING, "brackets": BRACKETS, "parts": PARTS}


@cache
def tokenizer_with(template: str | None) -> PreTrainedTokenizerFast:
    """A byte tokenizer with the tokens <|im_start|> and <|im_end|>, the latter its end token."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens(
        {
            "additional_special_tokens": [AddedToken("<|im_start|>", normalized=False, special=True)],
            "bos_token": AddedToken("<|begin|>", normalized=False, special=True),
            "eos_token": AddedToken("<|im_end|>", normalized=False, special=True),
        }
    )
    tokenizer.chat_template = template
    return tokenizer
