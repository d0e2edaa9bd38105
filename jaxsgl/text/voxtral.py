"""Voxtral's chat format, which its published folders don't tell in a template. `tokenizer_files.py` takes it."""

from __future__ import annotations

TRANSCRIBE = "[TRANSCRIBE]"  # what ends a prompt that asks for a transcript
# As Mistral's own program writes prompts, with its tokenizers of version 7.
VOXTRAL_TEMPLATE = """\
{%- set last = namespace(user=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.user = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role != 'user' and message.content and message.content is not string -%}
{{- raise_exception('messages of the user alone may have sounds, not those of the role ' + message.role) -}}
{%- endif -%}
{%- if message.role == 'system' -%}
{{- '[SYSTEM_PROMPT]' + message.content + '[/SYSTEM_PROMPT]' -}}
{%- elif message.role == 'user' -%}
{%- if tools and loop.index0 == last.user -%}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' -}}
{%- endif -%}
{{- '[INST]' -}}
{%- if message.content is string -%}
{{- message.content -}}
{%- else -%}
{%- for part in message.content -%}
{{- part.text if part.type == 'text' else '[BEGIN_AUDIO][AUDIO]' -}}
{%- endfor -%}
{%- endif -%}
{{- '[/INST]' -}}
{%- elif message.role == 'tool' -%}
{{- '[TOOL_RESULTS]' + (message.tool_call_id or '') + '[TOOL_CONTENT]' + message.content + '[/TOOL_RESULTS]' -}}
{%- elif message.role == 'assistant' -%}
{%- if message.content -%}{{- message.content -}}{%- endif -%}
{%- if message.tool_calls -%}
{{- '[TOOL_CALLS][' -}}
{%- for call in message.tool_calls -%}
{%- set made = {'name': call.function.name, 'arguments': call.function.arguments, 'id': call.id} -%}
{{- (made | tojson) + (', ' if not loop.last else '') -}}
{%- endfor -%}
{{- ']' -}}
{%- endif -%}
{{- eos_token -}}
{%- else -%}
{{- raise_exception('the role ' + message.role + ' is none of system, user, assistant and tool') -}}
{%- endif -%}
{%- endfor -%}
"""


def has_voxtrals_words(special_names: frozenset[str]) -> bool:
    """Whether a tokenizer's special tokens are those that `VOXTRAL_TEMPLATE` and transcripts need."""
    return {"[INST]", "[/INST]", "[BEGIN_AUDIO]", "[AUDIO]", TRANSCRIBE} <= special_names
