"""Chat templates: rendered as models were trained, from plain data, with no way out and no way to run for ever."""

import time
from typing import Any

import pytest

from jaxrt.artifacts import chat, sandbox
from jaxrt.errors import ArtifactError, RequestError

HELLO = [{"role": "user", "content": "hi"}]


def render(template: str, messages: Any = HELLO, tools: Any = None, **variables: Any) -> str:
    return chat.render(
        template,
        messages,
        bos_token="<s>",
        eos_token=None,
        add_generation_prompt=True,
        tools=tools,
        **variables,
    )


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi"),
        ("{{ messages[0]['role'] }}{% if add_generation_prompt %}!{% endif %}", "user!"),
        ("{% for m in messages %}\n  {% if loop.last %}\nx\n  {% endif %}\n{% endfor %}\ny", "x\ny"),  # no stray blanks
        ("[{{ eos_token }}{{ nowhere }}]{% if nowhere %}x{% endif %}{{ tools }}", "[]None"),
        ("{{ {'a': '<b> & é'} | tojson }}", '{"a": "<b> & é"}'),
        ("{{ {'b': 1, 'a': [2]} | tojson(indent=1, sort_keys=true) }}", '{\n "a": [\n  2\n ],\n "b": 1\n}'),
        ("{% generation %}a{% endgeneration %}b", "ab"),
        ("{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "01"),
        ("{% for k, v in {'a': 1}.items() if v %}{{ k ~ v }}{% endfor %}", "a1"),
        ("{% set ns = namespace(n=0) %}{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        (
            "{% macro m(x) %}<{{ x }}{{ caller() if caller }}>{% endmacro %}{{ m(1) }}{% call m(2) %}c{% endcall %}",
            "<1><2c>",
        ),
        ("{{ 'a,b '.strip().split(',') | join('-') }}{{ ', '.join(['x', 'y']) }}{{ 'abc'[::-1] }}", "a-bx, ycba"),
        ("{{ '%s %03d' % ('x', 7) }}{{ '{}:{:>3}'.format(1, 2) }}{{ 'a' * 3 }}{{ 2 ** 10 }}", "x 0071:  2aaa1024"),
        (
            "{{ ' x\n' | trim | upper | replace('X', 'yy') }}{{ [3, 1] | sort | sum }}{{ 'a\nb' | indent(2) }}",
            "yy4a\n  b",
        ),
        ("{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list | length }}", "1"),
        ("{{ 1.25 | round(1) }}{{ '<' | safe }}{{ none is none }}{{ messages[0].name is defined }}", "1.2<TrueFalse"),
    ],
)
def test_templates_render_as_models_were_trained(template: str, text: str):
    assert render(template) == text


def test_the_clock_is_there_for_templates_that_date_their_prompts():
    assert render("{{ strftime_now('%Y') }}") in (str(time.localtime().tm_year), str(time.localtime().tm_year + 1))


def test_parts_of_text_are_joined_as_a_template_that_knows_parts_would_write_them():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "ab"


def test_further_keys_and_variables_reach_the_template_as_plain_data():
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]}]
    template = (
        "{{ messages[0].tool_calls[0].function | tojson }}{{ messages[0].content }}{{ think }}{{ tools[0].name }}"
    )
    assert render(template, calls, [{"name": "g"}], think=(1, "a")) == (
        '{"name": "f", "arguments": {"x": 1}}None[1, \'a\']g'
    )


class Sneaky(str):
    """Text that brings code along."""

    def __str__(self) -> str:
        raise AssertionError("code of the caller's ran inside a template")

    secret = "s"


def test_a_template_gets_copies_of_text_not_the_callers_objects():
    assert (
        render("{{ messages[0].content }}{{ messages[0].content.secret }}", [{"role": "user", "content": Sneaky("a")}])
        == "a"
    )


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ("hi", "messages of type str"),
        ({"role": "user"}, "messages of type dict"),
        (None, "messages of type NoneType"),
        (["hi"], r"messages\[0\] is a str"),
        ([{"content": "hi"}], r"messages\[0\] has role None"),
        ([{"role": 1, "content": "hi"}], r"messages\[0\] has role 1"),
        ([{"role": "user"}], r"messages\[0\] has content of type NoneType"),
        ([{"role": "user", "content": b"hi"}], r"messages\[0\].content holds a bytes"),
        ([{"role": "user", "content": {"a": 1}}], r"messages\[0\] has content of type dict"),
        (
            [*HELLO, {"role": "user", "content": [{"type": "image_url"}]}],
            r"messages\[1\].content\[0\] is of type 'image",
        ),
        ([{"role": "user", "content": ["hi"]}], r"messages\[0\].content\[0\] is of type 'str'"),
        ([{"role": "user", "content": "a", "x": object()}], r"messages\[0\].x holds a object"),
        ([{"role": "user", "content": "a", "x": float("nan")}], r"messages\[0\].x holds a float"),
        ([{"role": "user", "content": "a", 1: "x"}], r"messages\[0\] has a key of type int"),
        ([{"role": "user", "content": "a", "x": nested(40)}], r"messages\[0\].x is nested more than"),
    ],
)
def test_what_is_not_plain_data_is_refused_before_the_template_runs(messages: Any, found: str):
    with pytest.raises(RequestError, match=found):
        render("{{ 1 / 0 }}", messages)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('roles must alternate') }}", "the chat template refuses: roles must alternate"),
        ("{{ nowhere.x }}", "lacks something: 'nowhere' is undefined"),
        ("{{ 'a' + 1 }}", "failed: TypeError"),
        ("{{ 1 / 0 }}", "failed: ZeroDivisionError"),
        ("{{ nowhere | tojson }}", "failed: TypeError"),
        ("{% include 'other' %}", "no loader"),
        (None, "without a chat template; .*as text, or pass chat_template="),
        (b"x", "a chat template of type bytes"),
    ],
)
def test_what_a_template_refuses_or_gets_wrong_is_said_in_its_own_words(template: Any, found: str):
    with pytest.raises(RequestError, match=found):
        render(template)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for %}", "does not parse: line 1"),
        ("{{ 'a' | urlize }}", "No filter named 'urlize'"),
        ("x" * (sandbox.MAX_TEMPLATE + 1), "characters, more than"),
        ("{% if 1 %}" * 500 + "{% endif %}" * 500, "nests or recurses"),
        ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "nests or recurses"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "nests or recurses"),
        ("{% block a %}{{ self.a() }}{% endblock %}", "nests or recurses"),
    ],
)
def test_malformed_templates_are_refused(template: str, found: str):
    with pytest.raises(ArtifactError, match=f"chat template: .*{found}"):
        render(template)


@pytest.mark.parametrize(
    ("template", "attribute"),
    [
        ("{{ ''.__class__.__mro__ }}", "__class__"),
        ("{{ ''['__class__'] }}", "__class__"),
        ("{{ '' | attr('__class__') }}", "__class__"),
        ("{{ messages | map(attribute='content.__class__') | list }}", "__class__"),
        ("{{ [''] | join(attribute='__class__') }}", "__class__"),
        ("{{ '{0.__class__}'.format('') }}", "__class__"),
        ("{{ raise_exception.__globals__ }}", "__globals__"),
        ("{{ namespace.__init__ }}", "__init__"),
        ("{{ self._TemplateReference__context }}", "_TemplateReference__context"),
        ("{{ messages.append(1) }}", "append"),
        ("{{ messages[0].update({}) }}", "update"),
        ("{{ 'a'.center(9) }}", "center"),
        ("{{ (1).to_bytes(9, 'big') }}", "to_bytes"),
    ],
)
def test_reaching_out_of_the_sandbox_is_refused_by_name(template: str, attribute: str):
    with pytest.raises(ArtifactError, match=f"reaches for what it must not have: '{attribute}'"):
        render(template)


# Each would take hours, or more memory than there is
GROW = "{%% set ns = namespace(x=%s) %%}{%% for i in range(99) %%}%s{%% endfor %%}{{ ns.x | string | length }}"
BOMBS = {
    "loops": "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "filtered loops": "{% for i in range(100000) %}{% for j in range(100000) if false %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for x in [1] * 99 recursive %}{{ loop([1, 2, 3, 4]) if loop.depth < 60 }}{% endfor %}",
    "macros": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "sorting": "{% for i in range(100000) %}{% set x = range(100000) | sort %}{% endfor %}",
    "output": "{% for i in range(100000) %}{% for j in range(100000) %}" + "a" * 1000 + "{% endfor %}{% endfor %}",
    "block": "{% set x %}{% for i in range(100000) %}" + "a" * 100_000 + "{% endfor %}{% endset %}",
    "block of values": "{% set x = 'a' * 8000000 %}"
    "{% set y %}{% for i in range(100000) %}{{ x }}{% endfor %}{% endset %}",
    "times": "{{ 'a' * 10 ** 12 }}",
    "times list": "{{ [1] * 10 ** 12 }}",
    "power": "{{ 10 ** (10 ** 10) }}",
    "numbers": GROW % ("9", "{% set ns.x = ns.x * ns.x %}"),
    "doubling ~": GROW % ("'ab'", "{% set ns.x = ns.x ~ ns.x %}"),
    "doubling +": GROW % ("'ab'", "{% set ns.x = ns.x + ns.x %}"),
    "doubling block": GROW % ("'ab'", "{% set t %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = t %}"),
    "shared lists": GROW % ("[1]", "{% set ns.x = [ns.x, ns.x] %}"),
    "shared tuples": GROW % ("(1,)", "{% set ns.x = (ns.x, ns.x) %}"),
    "shared dicts": GROW % ("{}", "{% set ns.x = dict(a=ns.x, b=ns.x) %}"),
    "shared views": GROW % ("{}", "{% set ns.x = {'a': [ns.x.items(), ns.x.items()]} %}"),
    "shared arguments": "{% macro m() %}{% set ns.x = varargs %}{% endmacro %}" + GROW % ("[1]", "{{ m(ns.x, ns.x) }}"),
    "depth": GROW % ("[]", "{% set ns.x = [ns.x] %}"),
    "copies": "{% set x = 'a' * 8000000 %}"
    "{% set ns = namespace(l=[]) %}{% for i in range(100000) %}{% set ns.l = ns.l + [x[1:]] %}{% endfor %}",
    "replace": "{% set x = 'a' * 1000000 %}{{ x | replace('a', x) }}",
    "replace method": "{% set x = 'a' * 1000000 %}{{ x.replace('', x) }}",
    "join": "{{ range(100000) | join('a' * 1000000) }}",
    "join method": "{% set x = 'a' * 1000000 %}{{ x.join('b' * 100000) }}",
    "strip": "{% set x = 'abc' * 1000000 %}{{ x.strip(x) }}",
    "trim": "{% set x = 'abc' * 1000000 %}{{ x | trim(x) }}",
    "indent": "{{ 'a' | indent(10 ** 12, true) }}",
    "tojson": "{{ [1] | tojson(indent=10 ** 12) }}",
    "round": "{{ 1.5 | round(10 ** 10, 'floor') }}",
    "sum": "{{ ([[1]] * 100000) | sum(start=[]) | length }}",
    "percent": "{{ '%1000000000000d' % 1 }}",
    "percent from argument": "{{ '%*d' % (10 ** 12, 1) }}",
    "percent filter": "{{ '%.1000000000000f' | format(1.0) }}",
    "format": "{{ '{:1000000000000}'.format(1) }}",
    "format from argument": "{{ '{:{}}'.format(1, 10 ** 12) }}",
    "date": "{{ strftime_now('%1000000000000d') }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_endless_and_exploding_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "MAX_SECONDS", 0.2)
    started = time.thread_time()
    bounds = "takes more|builds|renders more|computes|nests|strips|indents|rounds|sums|formats"
    with pytest.raises((ArtifactError, RequestError), match=bounds):
        render(BOMBS[name])
    assert time.thread_time() - started < 2
    assert render("{{ messages[0].content }}") == "hi"  # and nothing is left behind


def test_a_namespace_that_holds_itself_can_be_written():
    assert render("{% set ns = namespace() %}{% set ns.a = ns %}{{ [ns] }}") == "[<namespace>]"


def test_more_text_than_the_bound_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "MAX_TEXT", 100)
    assert render("{{ messages[0].content }}", [{"role": "user", "content": "a" * 100}]) == "a" * 100
    with pytest.raises(RequestError, match="renders more than 100 characters"):
        render("{{ messages[0].content }}", [{"role": "user", "content": "a" * 101}])
