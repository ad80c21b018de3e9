"""Tools, answers with calls, and small chat templates in the manner of each form, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from loraplex.text.tools.tool_types import CallDelta, Tool, joined

WEATHER = Tool(
    "get_weather",
    "The weather in a city.",
    {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "days": {"$ref": "#/$defs/days"}},
        "required": ["city"],
        "additionalProperties": False,
        "$defs": {"days": {"type": "integer", "minimum": 1, "maximum": 7}},
    },
)
CLOCK = Tool("clock", None, {"type": "object", "properties": {}, "additionalProperties": False})
TOOLS = (WEATHER, CLOCK)

Call = tuple[str, str]
"""Name and arguments of a call."""
ANSWERS: dict[str, list[tuple[str, str, list[Call]]]] = {
    "hermes": [
        ("no call <tool_cal", "no call <tool_cal", []),
        ('<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>', "", [("clock", "{}")]),
        (
            (
                'So: <tool_call>{"name":"a","arguments":{"x":"}</tool_call>\\"{"}}</tool_call>\n<tool_call>\n'
                '{"arguments": {"y": [1, {"z": null}]}, "name": "b"}\n</tool_call>\ndone '
            ),
            "So: \n\ndone",
            [("a", '{"x":"}</tool_call>\\"{"}'), ("b", '{"y": [1, {"z": null}]}')],
        ),
        ("<tool_call> that is none", "<tool_call> that is none", []),
        ('<tool_call>{"name": 7}', '<tool_call>{"name": 7}', []),
        ('<tool_call>{"name": "cut", "arguments": {"x": "', "", [("cut", '{"x": "')]),
        ('<tool_call>{"name": "cu', '<tool_call>{"name": "cu', []),
        ('<tool_call>{"name": "a"} </tool_call>', "", [("a", "{}")]),
        ('<tool_call>{"name": "a"}</tool_call>\n<tool_call>\n{"name": "cu', "", [("a", "{}")]),
        ('<tool_call>{"name": "a"}</tool_call>\n<tool_call>\n', "", [("a", "{}")]),
        ('<tool_call>{"name": "a"}</tool_call>\n<tool_ca', "", [("a", "{}")]),
        ('<tool_call>{"name": "a"}</tool_call> so <tool_ca', "so", [("a", "{}")]),
        ('{"name": "a", "arguments": {}}', '{"name": "a", "arguments": {}}', []),
        (" \n", " \n", []),
    ],
    "llama3": [
        ("It is 5 {o'clock}.", "It is 5 {o'clock}.", []),
        ('\n{"name": "clock", "parameters": {}}', "", [("clock", "{}")]),
        (
            '{"name": "a", "parameters": {"x": 1.5}}; {"name": "b", "parameters": {"y": true}}',
            "",
            [("a", '{"x": 1.5}'), ("b", '{"y": true}')],
        ),
        ('<|python_tag|>{"type": "function", "name": "a", "parameters": {}}', "", [("a", "{}")]),
        ('{"city": "Paris"} and more', '{"city": "Paris"} and more', []),
        ('{"name": "a", "parameters": {}}; or not', "; or not", [("a", "{}")]),
    ],
    "mistral": [
        ("[TOOL_CALL] is no mark", "[TOOL_CALL] is no mark", []),
        ('[TOOL_CALLS] [{"name": "clock", "arguments": {}}]', "", [("clock", "{}")]),
        (
            (
                'Yes. [TOOL_CALLS][{"name": "a", "arguments": {"x": [[], "]"]}} ,\n '
                '{"name": "b", "arguments": {}, "id": "q"}]'
            ),
            "Yes.",
            [("a", '{"x": [[], "]"]}'), ("b", "{}")],
        ),
        ("[TOOL_CALLS] none", "[TOOL_CALLS] none", []),
        ("[TOOL_CALLS] []", "[TOOL_CALLS] []", []),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ],
    "mistral_args": [
        ("[TOOL_CALL] is no mark", "[TOOL_CALL] is no mark", []),
        ("[TOOL_CALLS]clock[ARGS]{}", "", [("clock", "{}")]),
        (
            (
                'Yes. [TOOL_CALLS]a[ARGS]{"x": [[], "]}\\"{"]}\n[TOOL_CALLS] b[CALL_ID]abcdef123[ARGS] '
                '{"y": {"z": null}}'
            ),
            "Yes.",
            [("a", '{"x": [[], "]}\\"{"]}'), ("b", '{"y": {"z": null}}')],
        ),
        ("[TOOL_CALLS]none", "[TOOL_CALLS]none", []),
        ("[TOOL_CALLS]a {}", "[TOOL_CALLS]a {}", []),
        ('[TOOL_CALLS]cut[ARGS]{"x": "', "", [("cut", '{"x": "')]),
        ("[TOOL_CALLS]", "[TOOL_CALLS]", []),
    ],
    "qwen3_coder": [
        ("no call <tool_cal", "no call <tool_cal", []),
        ("<tool_call>\n<function=clock>\n</function>\n</tool_call>", "", [("clock", "{}")]),
        (
            (
                "So: <tool_call>\n<function=a>\n<parameter=x>\n[1, {}]\n</parameter>\n<parameter=y>\n"
                "it's \"</par\n\n</parameter>\n"
                "</function>\n</tool_call>\n<tool_call><function=b></function></tool_call>\ndone"
            ),
            "So: \n\ndone",
            [("a", '{"x": [1, {}], "y": "it\'s \\"</par\\n"}'), ("b", "{}")],
        ),
        ("<tool_call> that is none", "<tool_call> that is none", []),
        ("<tool_call><function=a", "<tool_call><function=a", []),
        ("<tool_call><func", "<tool_call><func", []),
        ("<tool_call><function=cut><parameter=x>\nab", "", [("cut", '{"x": ')]),
    ],
    "json": [
        ("Hello {you}", "Hello {you}", []),
        ('{"name": "clock", "arguments": {}}', "", [("clock", "{}")]),
        (
            '{"name": "a", "arguments": {"x": "\\u00e9\u00e9"}}\n{"name": "b", "arguments": {}}\n',
            "",
            [("a", '{"x": "\\u00e9\u00e9"}'), ("b", "{}")],
        ),
        ('{"answer": 1}', '{"answer": 1}', []),
        ("", "", []),
    ],
}
"""By form: answers, what of them is said, and what is called."""

HERMES_TEMPLATE = (
    "{% if tools %}<|im_start|>system\nTools: {% for t in tools %}{{ t | tojson }}\n{% endfor "
    "%}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson(indent=4) }}{% endfor %}{% for m in messages %}<h>{{ m.role "
    "}}</h>"
    '{% for c in m.tool_calls or [] %}{"name": "{{ c.function.name }}", "parameters": '
    "{{ c.function.arguments | tojson }}}{% else %}{{ m.content }}{% endfor %}<e>{% endfor %}"
    "{% if add_generation_prompt %}<h>assistant</h>{% endif %}"
)
MISTRAL_TEMPLATE = (
    "<s>{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.tool_calls is defined %}[TOOL_CALLS] [{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}, "id": "{{ c.id }}"}'
    "{% endfor %}]</s>{% elif m.role == 'tool' %}[R]{{ m.content }} {{ m.tool_call_id }}[/R]"
    "{% else %}[INST]{{ m.content }}[/INST]{% endif %}{% endfor %}"
)
ARGS_TEMPLATE = (
    "<s>{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
    "{% if m.tool_calls is defined %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}"
)
CODER_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>\n<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
XML_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content "
    "}}"
    "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}></function></tool_call>{% "
    "endfor %}"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
PLAIN_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "


def said_and_called(parts: Sequence[str | CallDelta]) -> tuple[str, list[Call]]:
    """What parts add up to."""
    calls = joined([part for part in parts if not isinstance(part, str)])
    assert len({call.id for call in calls}) == len(calls)
    text = "".join(part for part in parts if isinstance(part, str))
    return text, [(call.name, call.arguments) for call in calls]


def call_of(name: str, arguments: dict[str, Any], call_id: str = "call_1") -> dict[str, Any]:
    """A call in a message."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
