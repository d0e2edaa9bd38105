"""The chat formats of DeepSeek V3.2 and V4, whose published folders have a program in place of a template.

`tokenizer_files.py` takes them where a folder has no template. `developer` isn't named: as elsewhere such messages then
are the system's, while DeepSeek keeps the role for its own search. Where its program has no answer, as for a chat that
ends with the system's message, the assistant's turn begins as after the user's.
"""

from __future__ import annotations

import json

V32, V4 = "deepseek_v32", "deepseek_v4"
DEEPSEEKS = (V32, V4)  # values of model_type

# The words that the models were trained with: of tools, before and behind their schemas, and of the effort. Blank lines
# are those of DeepSeek's own examples of prompts.
_TOOLS_V32 = (
    "\n\n## Tools\n\n"
    "You have access to a set of tools you can use to answer the user's question.\n"
    'You can invoke functions by writing a "<｜DSML｜function_calls>" block like the following as part of your reply '
    "to the user:\n"
    "<｜DSML｜function_calls>\n"
    '<｜DSML｜invoke name="$FUNCTION_NAME">\n'
    '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\n'
    "...\n"
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="$FUNCTION_NAME2">\n'
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜function_calls>\n\n"
    "String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects "
    'should use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for '
    "other types (numbers, booleans, arrays, objects).\n\n"
    "If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking "
    "block. Here is an example:\n\n"
    "<｜DSML｜function_calls>\n"
    "...\n"
    "</｜DSML｜function_calls>\n\n"
    "<function_results>\n"
    "...\n"
    "</function_results>\n\n"
    "<think>...thinking about results</think>\n\n"
    "Here are the functions available in JSONSchema format:\n"
    "<functions>\n",
    "\n</functions>\n",
)
_TOOLS_V4 = (
    "\n\n## Tools\n\n"
    "You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "
    '"<｜DSML｜tool_calls>" block like the following:\n\n'
    "<｜DSML｜tool_calls>\n"
    '<｜DSML｜invoke name="$TOOL_NAME">\n'
    '<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>\n'
    "...\n"
    "</｜DSML｜invoke>\n"
    '<｜DSML｜invoke name="$TOOL_NAME2">\n'
    "...\n"
    "</｜DSML｜invoke>\n"
    "</｜DSML｜tool_calls>\n\n"
    'String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, '
    'arrays, objects), pass the value in JSON format and set `string="false"`.\n\n'
    "If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside "
    "<think>...</think> BEFORE any tool calls or final response.\n\n"
    "Otherwise, output directly after </think> with tool calls or final response.\n\n"
    "### Available Tool Schemas\n\n",
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n",
)
_ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, "
    "rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step, considered "
    "alternative, and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n"
)
_BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance: exhaustively decompose the "
    "problem into its most fundamental components, trace every causal chain to its root, and resolve the underlying "
    "cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles and are certain "
    "that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_LATER_V4 = "Beyond maximum"  # what the program holds whose model has an effort more
ENCODING_V4 = "encoding/encoding_dsv4.py"

# What both formats share. `on`: the model thinks; `now.last`: the message behind which its reasoning is kept; `answer`:
# what follows the mark of its turn. The text of a message may begin with its reasoning.
_BEGIN = r"""
{%- set on = thinking if thinking is defined else enable_thinking if enable_thinking is defined else THINKS -%}
{%- set now = namespace(last=-1, calls=[], results=[], asked=false) -%}
{%- for message in messages -%}
{%- if message.role in ASKING -%}{%- set now.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- macro system(content) -%}
{{- content or '' -}}
{%- if tools -%}
{{- ABOUT_TOOLS -}}
{%- for tool in tools -%}{{- ('' if loop.first else '\n') + (tool.function | tojson) -}}{%- endfor -%}
{{- BEHIND_TOOLS -}}
{%- endif -%}
{%- endmacro -%}
{%- macro answer(message, kept) -%}
{%- set content = message.content or '' -%}
{%- if content.startswith('<think>') and not message.reasoning_content -%}
{{- content if kept or '</think>' not in content else '</think>' + content.split('</think>', 1)[1] -}}
{%- else -%}
{{- ('<think>' + (message.reasoning_content or '') if kept and on else '') + '</think>' + content -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if loop.first -%}{{- '\n\n<｜DSML｜BLOCK>\n' -}}{%- endif -%}
{{- '<｜DSML｜invoke name="' + call.function.name + '">\n' -}}
{%- set arguments = call.function.arguments -%}
{%- for name, value in ({'arguments': arguments} if arguments is string else arguments or {}) | items -%}
{{- ('' if loop.first else '\n') + '<｜DSML｜parameter name="' + name -}}
{{- '" string="true">' + value if value is string else '" string="false">' + (value | tojson) -}}
{{- '</｜DSML｜parameter>' -}}
{%- endfor -%}
{{- '\n</｜DSML｜invoke>\n' -}}
{%- if loop.last -%}{{- '</｜DSML｜BLOCK>' -}}{%- endif -%}
{%- endfor -%}
{{- '<｜end▁of▁sentence｜>' -}}
{%- endmacro -%}
{{- '<｜begin▁of▁sentence｜>' -}}
EFFORT
{%- if messages[0].role != 'system' -%}{{- system('') -}}{%- endif -%}
{%- for message in messages -%}
{%- set before = '' if loop.first else loop.previtem.role -%}
{%- set after = '' if loop.last else loop.nextitem.role -%}
{%- if message.role == 'tool' -%}
{%- set its = namespace(place=0) -%}
{%- for call in now.calls -%}
{%- if call.id is defined and call.id == message.tool_call_id -%}{%- set its.place = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- set now.results = now.results + [{'place': its.place, 'content': message.content or ''}] -%}
{%- elif message.role == 'system' -%}
{{- system(message.content) if loop.first else message.content -}}
{%- elif message.role == 'assistant' -%}
{%- set now.calls = message.tool_calls or [] -%}
{%- elif message.role != 'user' -%}
{{- raise_exception('the role ' + message.role + ' is none of system, user, assistant and tool') -}}
{%- endif -%}
"""
_TURNS_V32 = r"""
{%- if message.role == 'user' -%}
{{- '<｜User｜>' + message.content + ('<｜Assistant｜></think>' if after == 'user' else '') -}}
{%- elif message.role == 'tool' and after != 'tool' -%}
{{- '\n\n<function_results>' -}}
{%- for result in now.results | sort(attribute='place') -%}{{- '\n<result>' + result.content + '</result>' -}}
{%- endfor -%}
{%- set now.results = [] -%}
{{- '\n</function_results>' + ('\n\n</think>' if after == 'user' else '') -}}
{%- elif message.role == 'assistant' -%}
{{- ('\n\n' if before == 'tool' else '<｜Assistant｜>') + answer(message, loop.index0 > now.last) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- ('\n\n' if messages[-1].role == 'tool' else '<｜Assistant｜>') + ('<think>' if on else '</think>') -}}
{%- endif -%}
"""
_TURNS_V4 = r"""
{%- if message.role == 'user' -%}
{{- ('\n\n' if now.asked else '<｜User｜>') + message.content -}}
{%- elif message.role == 'tool' and after != 'tool' -%}
{{- '\n\n' if now.asked else '<｜User｜>' -}}
{%- for result in now.results | sort(attribute='place') -%}
{{- ('' if loop.first else '\n\n') + '<tool_result>' + result.content + '</tool_result>' -}}
{%- endfor -%}
{%- set now.results = [] -%}
{%- elif message.role == 'assistant' -%}
{%- set whole = tools or (drop_thinking is defined and not drop_thinking) -%}
{{- '<｜Assistant｜>' + answer(message, whole or loop.index0 > now.last) -}}
{%- endif -%}
{%- set now.asked = message.role == 'user' or (message.role == 'tool' and (now.asked or after != 'tool')) -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<｜Assistant｜>' + ('<think>' if on else '</think>') -}}{%- endif -%}
"""
# V3.2 thinks only if asked to, V4 unless asked not to.
_THINKS_V32 = "reasoning_effort is defined and reasoning_effort and reasoning_effort != 'none'"
_THINKS_V4 = "reasoning_effort is not defined or reasoning_effort != 'none'"
_EFFORT_V4 = (
    "{%- set efforts = EFFORTS -%}"
    "{%- if on and reasoning_effort is defined -%}{{- efforts[reasoning_effort] or '' -}}{%- endif -%}"
)


def deepseeks_template(model_type: str, encoding: str) -> str:
    """Returns the template of one of `DEEPSEEKS`.

    `encoding`: the program that makes prompts in V4's folder, or nothing. V4 is told in words how much to think: for
    `max` alone at first; later ones also for `high`, with other words for `max`.
    """
    if model_type == V32:
        return _filled(_BEGIN + _TURNS_V32, _TOOLS_V32, "function_calls", "['user']", _THINKS_V32, "")
    efforts = {"max": _ABSOLUTE_MAXIMUM}
    if _LATER_V4 in encoding:
        efforts = {"high": _ABSOLUTE_MAXIMUM, "xhigh": _ABSOLUTE_MAXIMUM, "max": _BEYOND_MAXIMUM}
    effort = _EFFORT_V4.replace("EFFORTS", json.dumps(efforts, ensure_ascii=False))
    return _filled(_BEGIN + _TURNS_V4, _TOOLS_V4, "tool_calls", "['user', 'tool']", _THINKS_V4, effort)


def _filled(template: str, tools: tuple[str, str], block: str, asking: str, thinks: str, effort: str) -> str:
    texts = [json.dumps(text, ensure_ascii=False) for text in tools]  # JSON's texts are Jinja's, too
    names = {"THINKS": thinks, "ASKING": asking, "BLOCK": block, "EFFORT": effort}
    for name, value in {**names, "ABOUT_TOOLS": texts[0], "BEHIND_TOOLS": texts[1]}.items():
        template = template.replace(name, value)
    return template.strip()
