"""Chat templates: the text of transformers for the templates of well-known models, and clear answers to what
cannot be rendered."""

import json
import re

import pytest
import transformers

from shoal.errors import RequestError
from shoal.text.chat_template import ChatTemplate
from shoal.text.tokenizer import Tokenizer
from shoal.text.tool_prompt import describe
from tests import texts

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = "26 Jul 2024" %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\\n" }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" and '</think>' in content and loop.index0 <= ns.last_query_index %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<|im_start|>' + message.role + '\\n' + content }}
    {%- if message.tool_calls %}
        {%- for tool_call in message.tool_calls %}
            {{- '\\n<tool_call>\\n' + tool_call.function.name + ' ' }}{{- tool_call.function.arguments | tojson }}
        {%- endfor %}
    {%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == "
    "0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token}}{% "
    "endgeneration %}"
    "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)
PARTS = (
    "{% for message in messages %}[{{ message.role }}]{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type != 'text' %}{% continue %}{% endif %}"
    "<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
)
TEMPLATES = {"chatml": CHATML, "llama 3": LLAMA3, "qwen 3": QWEN3, "mistral": MISTRAL, "parts": PARTS}

USER, ASSISTANT = (
    {"role": "user", "content": " Hi <b>&</b> 'you'! "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello. "},
)
SYSTEM = {"role": "system", "content": "Be brief.\n"}
CALL = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "é<"}}}],
}
TOOLS = [
    {
        "type": "function",
        "function": {"name": "f", "description": "does <é>", "parameters": {"type": "object"}},
    }
]


def write(folder, template, **files):
    backend = texts.byte_level_backend(("<s>", "</s>"))
    backend.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)
    return Tokenizer.from_folder(folder)


def render(tmp_path, template, messages, **options):
    return write(tmp_path, template).apply_chat_template(messages, tokenize=False, **options)


@pytest.mark.parametrize(
    "name, messages, options",
    [
        *(
            (name, messages, {})
            for name in TEMPLATES
            for messages in ([USER], [USER, ASSISTANT, USER], [USER, ASSISTANT])
        ),
        *(
            (name, [USER, ASSISTANT], {"continue_final_message": True, "add_generation_prompt": False})
            for name in TEMPLATES
        ),
        *(
            (name, [SYSTEM, USER], {"add_generation_prompt": False})
            for name in ("chatml", "llama 3", "qwen 3")
        ),
        *(
            (name, [USER, CALL, {"role": "tool", "content": "4"}], {"tools": TOOLS})
            for name in ("llama 3", "qwen 3")
        ),
        ("qwen 3", [USER], {"enable_thinking": False}),
        ("llama 3", [USER], {"date_string": "1 Jan 2027"}),
        (
            "parts",
            [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}],
            {},
        ),
    ],
)
def test_the_text_is_that_of_transformers(name, messages, options, tmp_path):
    tokenizer = write(tmp_path, TEMPLATES[name])
    oracle = transformers.AutoTokenizer.from_pretrained(tmp_path)
    options = {"add_generation_prompt": True, **options}
    text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
    assert text == oracle.apply_chat_template(messages, tokenize=False, **options)
    assert tokenizer.apply_chat_template(messages, **options) == oracle.apply_chat_template(
        messages, return_dict=False, **options
    )


def test_text_parts_are_joined_for_a_template_that_expects_text(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "input_text", "text": "b"}, "c"]
    assert "user\na\nb\nc<|im_end|>" in render(tmp_path, CHATML, [{"role": "user", "content": parts}])


def test_arguments_of_tool_calls_may_be_json_text(tmp_path):
    call = json.loads(json.dumps(CALL))
    call["tool_calls"][0]["function"]["arguments"] = '{"x": "é<"}'
    assert render(tmp_path, QWEN3, [USER, call]) == render(tmp_path, QWEN3, [USER, CALL])
    assert call["tool_calls"][0]["function"]["arguments"] == '{"x": "é<"}', (
        "the caller's messages stay as they were"
    )


def test_a_message_without_content_is_empty(tmp_path):
    assert render(tmp_path, QWEN3, [{**CALL, "content": None}]) == render(tmp_path, QWEN3, [CALL])


def test_the_time_of_day_can_be_asked_for(tmp_path):
    assert render(tmp_path, "{{ strftime_now('%Y') }}", [USER]).isdigit()


def test_a_file_of_its_own_wins_and_named_templates_are_found(tmp_path):
    named = [
        {"name": "default", "template": "plain"},
        {"name": "tool_use", "template": "tools"},
        {"name": "rag", "template": "docs"},
    ]
    tokenizer = write(tmp_path, named)
    for options, text in (({}, "plain"), ({"tools": TOOLS}, "tools"), ({"chat_template": "rag"}, "docs")):
        assert tokenizer.apply_chat_template([USER], tokenize=False, **options) == text
    assert tokenizer.apply_chat_template([USER], chat_template="{{ bos_token }}", tokenize=False) == "<s>"
    assert (
        write(tmp_path, "settings", chat_template__json=json.dumps({"chat_template": "json"})).chat_template
        == "json"
    )
    assert write(tmp_path, "settings", chat_template__jinja="jinja").chat_template == "jinja"


def test_named_templates_have_files_of_their_own(tmp_path):
    """Regression: the folder additional_chat_templates, where transformers writes them, was passed over."""
    more = tmp_path / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text("tools")
    (more / "rag.jinja").write_text("\ufeffdocs")
    for files in ({}, {"chat_template__jinja": "settings"}):  # the default one in either place
        tokenizer = write(tmp_path, "settings", **files)
        for options, text in (
            ({}, "settings"),
            ({"tools": TOOLS}, "tools"),
            ({"chat_template": "rag"}, "docs"),
        ):
            assert tokenizer.apply_chat_template([USER], tokenize=False, **options) == text


def test_a_byte_order_mark_is_not_part_of_a_template(tmp_path):
    assert write(tmp_path, "\ufeffsettings").chat_template == "settings"
    assert write(tmp_path, "", chat_template__jinja="\ufeffjinja").chat_template == "jinja"


def test_without_a_template_the_error_says_how_to_give_one(tmp_path):
    with pytest.raises(RequestError, match="chat_template"):
        render(tmp_path, None, [USER])


@pytest.mark.parametrize(
    "messages, said",
    [
        ([], r"messages must be a list of messages, got \[\]; give \[{'role': 'user', 'content': 'text'}\]$"),
        ("hi", "messages must be a list of messages, got"),
        ({"role": "user"}, "messages must be a list of messages, got"),
        ([["x"]], "role"),
        ([{"content": "x"}], "role"),
        ([{"role": 5, "content": "x"}], "role"),
        ([{"role": "user", "content": 5}], "content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "image_url"),
        ([{"role": "user", "content": object()}], r"messages\[0\]"),
        ([USER, {"role": "assistant", "tool_calls": [{"function": None}]}], r"messages\[1\].tool_calls\[0\]"),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, 5]}],
            r"messages\[1\].tool_calls\[1\]",
        ),
    ],
)
def test_malformed_messages_are_refused(messages, said, tmp_path):
    with pytest.raises(RequestError, match=said):
        render(tmp_path, CHATML, messages)


@pytest.mark.parametrize(
    "template, said",
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[7]['role'] }}", "the chat template refuses them"),
        ("{{ 'a' + 1 }}", "the chat template refuses them"),
        ("{{ 1 / 0 }}", "the chat template refuses them"),
        ("{% if %}", "not valid Jinja"),
        ("{{ messages.append('x') }}", "the chat template refuses them"),
        ("{{ ''.__class__.__mro__ }}", "the chat template refuses them"),
        ("{{ range(10**9) | list }}", "the chat template refuses them"),
    ],
)
def test_a_template_that_fails_is_the_requests_error(template, said, tmp_path):
    with pytest.raises(RequestError, match=said):
        render(tmp_path, template, [USER])


CALLS = [
    {"id": str(i), "type": "function", "function": {"name": "f", "arguments": {"x": i}}} for i in range(2)
]
TOLD = [
    USER,
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "one"},
    {"role": "tool", "content": [{"type": "text", "text": "two"}]},
]
SAID = [
    {
        "role": "assistant",
        "content": '<tool_call>\n{"name": "f", "arguments": {"x": 0}}\n</tool_call>\n'
        '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>',
    },
    {
        "role": "user",
        "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>",
    },
]
NO_SYSTEM = (
    "{{ bos_token + '' }}{% for m in messages %}"
    "{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)
IGNORES_SYSTEM = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


def test_tools_without_a_place_in_the_template_come_in_its_system_message(tmp_path):
    tokenizer = write(tmp_path, CHATML)

    def text(messages, **options):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    described = describe(TOOLS, "hermes")
    assert json.dumps(TOOLS[0], ensure_ascii=False) in described
    assert text(TOLD, tools=TOOLS) == text([{"role": "system", "content": described}, USER, *SAID])
    merged = [{"role": "system", "content": f"Be brief.\n\n{described}"}, USER]
    assert text([{"role": "system", "content": "Be brief."}, USER], tools=TOOLS) == text(merged)
    assert text(TOLD) == text([USER, *SAID])


@pytest.mark.parametrize("template", [NO_SYSTEM, IGNORES_SYSTEM])
def test_tools_come_before_the_users_words_where_the_template_writes_no_system_message(template, tmp_path):
    text = write(tmp_path, template).apply_chat_template([*TOLD, USER], tools=TOOLS, tokenize=False)
    described, said = describe(TOOLS, "hermes"), USER["content"]
    calls, results = [message["content"] for message in SAID]
    expected = f"<user>{described}\n\n{said}<assistant>{calls}<user>{results}\n\n{said}"
    assert text.removeprefix("<s>") == expected


def test_a_template_that_reads_tools_gets_them_and_no_description(tmp_path):
    for template in (LLAMA3, QWEN3):
        text = write(tmp_path, template).apply_chat_template([USER], tools=TOOLS, tokenize=False)
        assert "<tool_call>\n{" not in text


def test_a_developer_is_the_system_where_the_template_knows_none(tmp_path):
    messages = [{"role": "developer", "content": "Be brief."}, USER]
    assert "<|im_start|>system\nBe brief." in render(tmp_path, CHATML, messages)
    assert (
        render(
            tmp_path,
            "{% for m in messages %}{% if m.role == 'developer' %}dev{{ m.content }}{% endif %}{% endfor %}",
            messages,
        )
        == "devBe brief."
    )


def test_what_cannot_be_continued_is_refused(tmp_path):
    with pytest.raises(RequestError, match="exclude each other"):
        render(tmp_path, CHATML, [USER], continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(RequestError, match="does not write the final message"):
        render(tmp_path, "fixed text", [USER], continue_final_message=True, add_generation_prompt=False)
    with pytest.raises(RequestError, match="variables"):
        render(tmp_path, CHATML, [USER], thing=object())


def test_an_empty_list_of_calls_counts_as_absent():
    """Regression: templates that look for the key refused answers of clients that send `tool_calls: []`."""
    source = (
        "{% for m in messages %}{% if 'tool_calls' in m %}{{ raise_exception('a call') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "tool_calls": []}]
    assert ChatTemplate(source).render(messages, add_generation_prompt=True) == "ab"
    assert messages[1]["tool_calls"] == []


@pytest.mark.parametrize("role", ["system", "developer"])
def test_a_billing_line_goes_alone(role):
    """Regression: blank lines after it went, too, and developer messages kept it."""
    source = "{% for m in messages if m.role in ('system', 'developer') %}{{ m.content }}{% endfor %}"
    messages = [{"role": role, "content": "x-anthropic-billing-header: cch=1;\n\n  Rules."}]
    assert ChatTemplate(source).render(messages, add_generation_prompt=True) == "\n  Rules."


def called(*arguments, ids=None, content=None):
    calls = [
        {"id": (ids or "abcdefgh")[k], "type": "function", "function": {"name": f"f{k}", "arguments": given}}
        for k, given in enumerate(arguments)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def result(call_id, text):
    return {"role": "tool", "tool_call_id": call_id, "content": text}


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}"
    "{{ raise_exception('nine') }}{% endif %}[{{ c.function.name }} {{ c.id }}]{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine') }}{% endif %}"
    "[{{ m.tool_call_id }} {{ m.content }}]{% endif %}{{ '' + m.content }}{% endfor %}"
)


def test_ids_of_calls_are_nine_letters_and_digits_where_the_template_wants_them(tmp_path):
    """Regression: the second turn of every conversation with tools was a 400 with Mistral's templates."""
    ids = ["call_8f14e45fceea167a5a36dedd4bea2543", "toolu_01A09q90qw90lq917835lq9"]
    text = render(
        tmp_path, NINE, [USER, called("{}", "{}", ids=ids), result(ids[1], "two"), result(ids[0], "one")]
    )
    calls = dict(re.findall(r"\[(f\d) ([a-zA-Z0-9]{9})\]", text))
    assert re.findall(r"\[([a-zA-Z0-9]{9}) (one|two)\]", text) == [(calls["f1"], "two"), (calls["f0"], "one")]
    assert "[f0 abcABC123]" in render(tmp_path, NINE, [USER, called("{}", ids=["abcABC123"])])
    # Clients of Ollama's API send no ids: results belong to the calls in their order.
    bare = called("{}", "{}")
    for call in bare["tool_calls"]:
        del call["id"]
    text = render(
        tmp_path, NINE, [USER, bare, {"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
    )
    calls = dict(re.findall(r"\[(f\d) ([a-zA-Z0-9]{9})\]", text))
    assert re.findall(r"\[([a-zA-Z0-9]{9}) (one|two)\]", text) == [(calls["f0"], "one"), (calls["f1"], "two")]


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('one') }}{% endif %}[{{ m.tool_calls[0].function.name }}]"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
        "{% for m in messages %}{% if m.tool_calls %}[{{ m.tool_calls[0].function.name }}]"
        "{% else %}[{{ m.content }}]{% endif %}{% endfor %}",
    ],
    ids=["refuses", "drops"],
)
def test_several_calls_are_messages_of_their_own_where_the_template_takes_one(template, tmp_path):
    """Regression: Llama 3's template refused the message that this server had made of two calls."""
    messages = [
        {"role": "user", "content": "Go"},
        called("{}", "{}", "{}"),
        result("c", "third"),
        result("a", "first"),
        result("b", "second"),
        {"role": "user", "content": "On"},
    ]
    text = render(tmp_path, template, messages)
    assert text == "[Go][f0][first][f1][second][f2][third][On]"


ITEMS = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.name }}"
    "{% for key, value in c.function.arguments | items %}<{{ key }}={{ value }}>{% endfor %}{% endfor %}{% endfor %}"
)
TEXT = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ '<' + c.function.arguments + '>' }}{% endfor %}{% endfor %}"
AS_JSON = "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template, given, written",
    [
        (ITEMS, '{"x": 1}', "f0<x=1>"),
        (ITEMS, {"x": 1}, "f0<x=1>"),
        (ITEMS, '{"x": "cut he', 'f0<arguments={"x": "cut he>'),
        (ITEMS, "[1, 2]", "f0<arguments=[1, 2]>"),
        (ITEMS, "5", "f0<arguments=5>"),
        (ITEMS, "", "f0"),
        (ITEMS, "null", "f0"),
        (ITEMS, None, "f0"),
        (TEXT, '{"x":  1}', '<{"x":  1}>'),
        (TEXT, {"x": 1}, '<{"x": 1}>'),
        (TEXT, "[1]", "<[1]>"),
        (TEXT, '{"x": ', '<{"x": >'),
        (AS_JSON, '{"x": 1}', '{"x": 1}'),
        (AS_JSON, "[1]", "[1]"),
        (AS_JSON, '{"x', '"{\\"x"'),
        (AS_JSON, '{"x": "cut \\ud83d"}', '{"x": "cut \N{REPLACEMENT CHARACTER}"}'),
        (AS_JSON, '{"x": "\\ud83d\\ude00"}', '{"x": "\U0001f600"}'),
    ],
)
def test_arguments_are_written_as_the_template_takes_them(template, given, written, tmp_path):
    """Regression: arguments that a model wrote wrongly made every later turn a 400."""
    assert render(tmp_path, template, [USER, called(given), result("a", "4")]) == written


ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
    "[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
LAST_SYSTEM = (
    "{% set ns = namespace(s='') %}{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = m.content %}"
    "{% endif %}{% endfor %}[system|{{ ns.s }}]{% for m in messages %}{% if m.role != 'system' %}"
    "[{{ m.role }}|{{ m.content }}]{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "[{{ m.role }}|{{ m.content }}]{% endfor %}"
)
DROPS_SYSTEM = (
    "{% for m in messages %}{% if m.role != 'system' %}[{{ m.role }}|{{ m.content }}]{% endif %}{% endfor %}"
)
MANY_SYSTEMS = "{% for m in messages %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
HI, YES = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}
RULE, LATE = {"role": "system", "content": "One."}, {"role": "developer", "content": "Two."}
LATER = [RULE, HI, YES, LATE, HI]


@pytest.mark.parametrize(
    "template, messages, written",
    [
        (ONE_SYSTEM, [RULE, LATE, HI], "[system|One.\n\nTwo.][user|Hi]"),
        (ONE_SYSTEM, LATER, "[system|One.\n\nTwo.][user|Hi][assistant|Yes.][user|Hi]"),
        (LAST_SYSTEM, LATER, "[system|One.\n\nTwo.][user|Hi][assistant|Yes.][user|Hi]"),
        (NO_SYSTEM, LATER, "[user|One.\n\nTwo.\n\nHi][assistant|Yes.][user|Hi]"),
        (NO_SYSTEM, [{"role": "system", "content": " "}, HI], "[user|Hi]"),
        (DROPS_SYSTEM, [RULE, HI], "[user|One.\n\nHi]"),
        (MANY_SYSTEMS, LATER, "[system|One.][user|Hi][assistant|Yes.][system|Two.][user|Hi]"),
    ],
)
def test_no_instruction_is_lost(template, messages, written, tmp_path):
    """Regression: templates with one instruction refused several, or kept only the last one."""
    assert render(tmp_path, template, messages) == written


@pytest.mark.parametrize(
    "template, written",
    [
        (
            "{% for m in messages %}[{{ m.content if m.content is not none else 'nothing' }}]{% endfor %}",
            "[Hi][nothing]",
        ),
        (
            "{% for m in messages %}[{{ m.content }}]{% endfor %}{{ messages[1].tool_calls | length }}",
            "[Hi][]1",
        ),
        (
            "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}{{ messages[1].tool_calls | length }}",
            "[Hi][]1",
        ),
    ],
)
def test_null_content_is_none_where_the_template_can_take_it(template, written, tmp_path):
    assert (
        render(
            tmp_path,
            "{% if false %}{{ tool_calls }}{{ 'tool_calls' }}{% endif %}" + template,
            [HI, called("{}")],
        )
        == written
    )
    without_calls = template.partition("{{ messages[1]")[0]
    text = render(tmp_path, without_calls, [HI, {"role": "assistant", "content": None}])
    assert text == written.removesuffix("1")


def test_a_role_of_the_templates_own_is_written_and_another_is_refused(tmp_path):
    """Regression: a role that only the template knows was refused before the template was asked."""
    own = [HI, {"role": "ipython", "content": [{"type": "text", "text": "4"}]}]
    assert render(tmp_path, MANY_SYSTEMS, own) == "[user|Hi][ipython|4]"
    known = "{% for m in messages %}{% if m.role in ('user', 'assistant') %}[{{ m.content }}]{% endif %}{% endfor %}"
    with pytest.raises(
        RequestError, match=r"^messages\[1\]\.role must be one that the chat template writes, got 'ipython'"
    ):
        render(tmp_path, known, [HI, {"role": "ipython", "content": "a result"}])


def test_half_a_character_in_a_message_is_replaced(tmp_path):
    messages = [{"role": "user", "content": "a \ud83d b \U0001f600"}]
    assert render(tmp_path, MANY_SYSTEMS, messages) == "[user|a \N{REPLACEMENT CHARACTER} b \U0001f600]"


def test_an_instruction_that_moves_leaves_one_message_of_the_user(tmp_path):
    """Regression: with the instruction moved to the start, templates whose roles take turns refused the two."""
    turns = (
        "{% set ns = namespace(users=0) %}{% for m in messages %}"
        "{% if m.role == 'system' and not loop.first %}{{ raise_exception('first') }}{% endif %}"
        "{% if m.role == 'user' and messages[loop.index0 - 1].role == 'user' and not loop.first %}"
        "{{ raise_exception('turns') }}{% endif %}[{{ m.role }}|{{ m.content }}]{% endfor %}"
    )
    assert render(tmp_path, turns, [HI, LATE, HI]) == "[system|Two.][user|Hi\n\nHi]"
    with pytest.raises(RequestError, match="turns"):
        render(tmp_path, turns, [HI, HI])


FIRST_CALL = (  # as gpt-oss: content is searched without a look whether it is null
    "{% for m in messages %}{% if '<|' in m.content %}{{ raise_exception('tags') }}{% endif %}"
    "{% if 'tool_calls' in m %}[{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}]"
    "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
)
CALLS_BESIDE_NULL = (  # as the distilled models of DeepSeek R1: arguments are text, too
    "{% for m in messages %}{% if m.role == 'assistant' and m.content is none %}{% for c in m.tool_calls %}"
    "{{ '[' + c.function.name + ' ' + c.function.arguments + ']' }}{% endfor %}"
    "{% else %}{{ '[' + m.content + ']' }}{% endif %}{% endfor %}"
)
TALKED = [
    {"role": "user", "content": "Go"},
    called('{"x": 1}', '{"x": 2}'),
    result("a", "first"),
    result("b", "second"),
]


def test_traits_of_a_template_do_not_hide_one_another(tmp_path):
    """Regression: the second call was lost where the template also refused null content."""
    text = '[Go][f0 {"x": 1}][first][f1 {"x": 2}][second]'
    assert render(tmp_path, FIRST_CALL, TALKED) == text
    assert render(tmp_path, CALLS_BESIDE_NULL, TALKED) == '[Go][f0 {"x": 1}][f1 {"x": 2}][first][second]'


@pytest.mark.parametrize("content, said", [("", ""), ("Let me see.", "[Let me see.]")])
def test_calls_are_not_lost_beside_content(content, said, tmp_path):
    """Regression: a template that writes calls beside null content alone dropped the others without a word."""
    messages = [{"role": "user", "content": "Go"}, called("{}", content=content), result("a", "4")]
    assert render(tmp_path, CALLS_BESIDE_NULL, messages) == f"[Go]{said}[f0 {{}}][4]"
    assert render(tmp_path, FIRST_CALL, messages) == "[Go][f0 {}][4]"


def test_words_after_a_result_stand_in_it_where_the_user_may_not_speak_then(tmp_path):
    """Regression: Mistral's templates refused what agents send, a result and a reminder in one turn."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' and not loop.first "
        "and messages[loop.index0 - 1].role == 'tool' %}{{ raise_exception('turns') }}{% endif %}"
        "[{{ m.role }}|{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }}{% endfor %}]{% endfor %}"
    )
    messages = [HI, called("{}", content=""), result("a", "4"), {"role": "user", "content": "On"}, YES, HI]
    expected = "[user|Hi][assistant|f0][tool|4\n\nOn][assistant|Yes.][user|Hi]"
    assert render(tmp_path, template, messages) == expected
    free = template.replace("raise_exception('turns')", "''")
    assert render(tmp_path, free, messages) == expected.replace("4\n\nOn]", "4][user|On]")


def test_an_empty_answer_is_a_space_where_the_template_refuses_none(tmp_path):
    """Regression: an answer of this server that had no text ended the conversation with such a template."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' and not m.content %}{{ raise_exception('empty') }}"
        "{% endif %}[{{ m.content }}]{% endfor %}"
    )
    for content in ("", None, []):
        assert (
            render(tmp_path, template, [HI, {"role": "assistant", "content": content}, HI]) == "[Hi][ ][Hi]"
        )
    assert (
        render(tmp_path, MANY_SYSTEMS, [HI, {"role": "assistant", "content": ""}]) == "[user|Hi][assistant|]"
    )


def test_a_request_cannot_change_what_is_known_of_a_template(tmp_path):
    """Regression: the probes of a template read the special tokens of the last request."""
    tokenizer = write(tmp_path, "{{ bos_token + '' }}" + NINE)
    with pytest.raises(RequestError):
        tokenizer.apply_chat_template([USER, called("{}", ids=["call_1"])], bos_token=None)
    text = tokenizer.apply_chat_template([USER, called("{}", ids=["call_1"])], tokenize=False)
    assert text.startswith("<s>") and re.search(r"\[f0 [a-zA-Z0-9]{9}\]", text)


def test_words_that_stand_elsewhere_do_not_hide_a_lost_message(tmp_path):
    """Regression: an instruction or a role that the template drops counted as written if its words stood in
    another message, or twice."""
    rule, hi = {"role": "system", "content": "Hi"}, {"role": "user", "content": "Hi there"}
    assert render(tmp_path, DROPS_SYSTEM, [rule, hi]) == "[user|Hi\n\nHi there]"
    assert render(tmp_path, LAST_SYSTEM, [rule, hi, rule]) == "[system|Hi\n\nHi][user|Hi there]"
    assert render(tmp_path, DROPS_SYSTEM + "{# Hi #}", [rule, YES, HI]) == "[assistant|Yes.][user|Hi\n\nHi]"
    assert render(tmp_path, MANY_SYSTEMS, [rule, hi, rule]) == "[system|Hi][user|Hi there][system|Hi]"
    known = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.content }}]{% endfor %}"
    for text in ("Hi", ""):
        with pytest.raises(
            RequestError, match=r"^messages\[1\]\.role must be one that the chat template writes"
        ):
            render(tmp_path, known, [hi, {"role": "robot", "content": text}])


# As Kimi K2's: a call is written by its id and arguments, without its name, and content is read by `get`.
CALLS_WITHOUT_NAMES = """{% for m in messages %}[{% set c = m.get('content') %}
{%- if c is string %}{{ c }}{% elif c is not none %}{% for part in c %}{{ part['text'] }}{% endfor %}{% endif %}
{%- for call in m['tool_calls'] or [] %}({{ call['id'] }} {{ call['function']['arguments'] | tojson }}){% endfor %}]
{%- endfor %}"""
# As gpt-oss': thoughts are called `thinking`, and an answer with calls has no words beside them.
THINKING = """{% for m in messages %}
{%- if m.tool_calls and m.content and m.thinking %}{{ raise_exception('thinking beside content') }}{% endif %}
{%- if m.thinking %}({{ m.thinking }}){% endif %}{{ m.content }}
{%- for call in m.tool_calls or [] %}<{{ call.function.name }} {{ call.function.arguments | tojson }}>{% endfor %};
{%- endfor %}"""
TWO_CALLS = [
    {"id": name, "type": "function", "function": {"name": "f", "arguments": {"x": name}}} for name in "ab"
]


def test_calls_stay_in_one_message_for_a_template_that_writes_no_names():
    """Regression: each call of a message got a message of its own, which Kimi K2 was not trained on."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": None, "tool_calls": TWO_CALLS},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
        {"role": "tool", "tool_call_id": "b", "content": "2"},
    ]
    text = ChatTemplate(CALLS_WITHOUT_NAMES).render(messages, add_generation_prompt=False)
    assert text == '[Hi][(a {"x": "a"})(b {"x": "b"})][1][2]'


@pytest.mark.parametrize(
    "template",
    [
        CALLS_WITHOUT_NAMES,
        "{% for m in messages %}[{{ m.content if m.content is string else m.content | map(attribute='text') | join('') }}]{% endfor %}",
    ],
)
def test_a_template_that_gets_or_maps_content_joins_the_parts_itself(template):
    """Regression: parts of such a template were joined by line breaks, not as transformers renders them."""
    messages = [{"role": "user", "content": [{"type": "text", "text": text} for text in ("Hi", "Yo")]}]
    assert ChatTemplate(template).render(messages, add_generation_prompt=False) == "[HiYo]"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_reach_a_template_that_calls_them_thinking(name):
    """Regression: templates of gpt-oss and LFM2, which read `thinking`, lost the thoughts between calls."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", name: "hmm", "tool_calls": TWO_CALLS[:1]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    text = ChatTemplate(THINKING).render(messages, add_generation_prompt=False)
    assert text == 'Hi;(hmm)<f {"x": "a"}>;1;'


def test_thoughts_beside_words_and_calls_end_no_conversation():
    """Regression: gpt-oss' template refuses all three in one message, which agents send back."""
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "So", "reasoning": "hmm", "tool_calls": TWO_CALLS[:1]},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ]
    text = ChatTemplate(THINKING).render(messages, add_generation_prompt=False)
    assert text == 'Hi;So<f {"x": "a"}>;1;'
