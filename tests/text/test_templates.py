"""Templates of clients run in a child process, and end within their limits whatever they compute."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.text import templates
from jaxsgl.text.tokenizer import TemplateOptions, Tokenizer, load_tokenizer
from tests.text.small_tokenizers import byte_level, save

DOCUMENTS = [{"title": "Tides", "text": "The moon pulls."}]
TURNS = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "Well,"}]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without a template of its own."""
    return load_tokenizer(save(byte_level(), tmp_path_factory.mktemp("model"), chat_template=None))


@pytest.fixture
def model(tmp_path: Path) -> Tokenizer:
    """With the same template as the client sends."""
    return load_tokenizer(save(byte_level(), tmp_path, chat_template=TEMPLATE))


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{{ tools | tojson }}{{ mood }}"
    "{% for d in documents or [] %}({{ d.title }}: {{ d.text }}){% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


@pytest.mark.parametrize(
    "options",
    [
        TemplateOptions(variables={"mood": "é🎉"}, tools=[{"type": "function", "function": {"name": "f"}}]),
        TemplateOptions(add_generation_prompt=False, continue_final_message=True),
        TemplateOptions(variables={"documents": DOCUMENTS}),
    ],
    ids=["variables", "continued", "documents"],
)
def test_a_clients_template_makes_the_same_text_as_if_it_were_the_models(
    tokenizer: Tokenizer, model: Tokenizer, options: TemplateOptions
) -> None:
    clients = TemplateOptions(
        options.tools, options.add_generation_prompt, options.continue_final_message, options.variables, TEMPLATE
    )
    assert tokenizer.render_chat(TURNS, clients) == model.render_chat(TURNS, options)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", r"0\.5 s of processor time"),
        ("{{ 9 ** (9 ** 8) }}", r"0\.5 s of processor time"),
        ("{{ 'a' * 10 ** 9 }}", "128 MiB of memory"),
        ("{% set ns = namespace(a='a' * 1000000) %}{% for _ in range(40) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
         "128 MiB of memory"),
        ("{% if %}", "refuses these messages: Expected an expression"),
        ("{{ raise_exception('no robots') }}", "refuses these messages: no robots"),
        ("{{ messages.__class__.__mro__ }}", "refuses these messages: access to attribute '__class__'"),
    ],
)  # fmt: skip
def test_a_template_that_fails_or_takes_too_much_is_the_clients_mistake(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, template: str, reason: str
) -> None:
    monkeypatch.setattr(templates, "CPU_S", 0.5)
    with pytest.raises(InvalidRequest, match=f"the request's chat template .*{reason}"):
        tokenizer.render_chat(TURNS, TemplateOptions(template=template))
    assert tokenizer.render_chat(TURNS, TemplateOptions(template="{{ messages[0].content }}!")) == "hello!"


def test_a_template_prints_the_documents_of_a_request(model: Tokenizer) -> None:
    text = model.render_chat(TURNS, TemplateOptions(variables={"documents": DOCUMENTS}))
    assert text.endswith("(Tides: The moon pulls.)>")


def test_documents_that_are_no_objects_are_the_clients_mistake(model: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="list of dicts"):
        model.render_chat(TURNS, TemplateOptions(variables={"documents": ["Tides"]}))
