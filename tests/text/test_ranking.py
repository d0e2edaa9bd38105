"""Prompts that rank texts: by the model's own template if it knows pairs, and what their scores are made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxsgl.errors import InvalidRequest
from jaxsgl.requests.outputs import Pooled, PoolingSpec
from jaxsgl.text.ranking import Ranking, num_chars_of, ranking_of
from jaxsgl.text.tokenizer import Tokenizer, Truncation, load_tokenizer
from tests.text.small_tokenizers import byte_level, save

PAIR_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'system' %}<|start|>{{ m['content'] }}<|end|>"
    "{% elif m['role'] == 'query' %}Q: {{ m['content'] }}\n"
    "{% elif m['role'] == 'document' %}D: {{ m['content'] | trim }}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}So:{% endif %}"
)
PARTS_TEMPLATE = (
    "Q: {{ (messages | selectattr('role', 'eq', 'query') | first).content[0].text }}\n"
    "D: {{ (messages | selectattr('role', 'eq', 'document') | first).content[0].text }}<|end|>"
)
PAIR = ("hello", "the lazy dog")
KINDS = {"head": PoolingSpec(labels=("good",), activation="sigmoid"), "answers": PoolingSpec(answer_ids=(41, 42))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tokenizers with templates of pairs, and one with a template of chats alone."""
    backend = byte_level()
    backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    backend.add_tokens(["yes", "no"])
    templates = {"pairs": (PAIR_TEMPLATE,), "parts": (PARTS_TEMPLATE,), "chats": ()}
    return {name: Path(save(backend, tmp_path_factory.mktemp(name), *template)) for name, template in templates.items()}


def rank(folder: Path, spec: PoolingSpec, **asked: Any) -> tuple[Tokenizer, Ranking]:
    tokenizer = load_tokenizer(str(folder))
    return tokenizer, ranking_of(tokenizer, spec, [asked.pop("pair", PAIR)], **asked)


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_template_with_roles_for_a_pair_makes_its_prompt(folders: dict[str, Path], kind: str) -> None:
    tokenizer, ranking = rank(folders["pairs"], KINDS[kind])
    assert tokenizer.text_with_names(ranking.prompts[0]) == "Q: hello\nD: the lazy dog<|end|>"
    _, told = rank(folders["pairs"], KINDS[kind], instruction="Find")
    assert tokenizer.text_with_names(told.prompts[0]) == "<|start|>Find<|end|>Q: hello\nD: the lazy dog<|end|>"
    _, in_parts = rank(folders["parts"], KINDS[kind])
    assert in_parts.prompts == ranking.prompts


def test_a_folder_says_whether_the_prompt_of_a_pair_begins_an_answer(folders: dict[str, Path]) -> None:
    tokenizer, ranking = rank(folders["pairs"], PoolingSpec(answer_ids=(41, 42), begins_answer=True))
    assert tokenizer.text_with_names(ranking.prompts[0]) == "Q: hello\nD: the lazy dog<|end|>So:"


def test_the_document_alone_is_cut_out_of_a_templates_prompt(folders: dict[str, Path]) -> None:
    tokenizer, ranking = rank(folders["pairs"], KINDS["head"])
    num_tokens = len(ranking.prompts[0])
    _, cut = rank(
        folders["pairs"], KINDS["head"], pair=("hello", " the lazy dog" * 9), truncation=Truncation(num_tokens, True)
    )
    assert len(cut.prompts[0]) == num_tokens
    text = tokenizer.text_with_names(cut.prompts[0])
    assert text.startswith("Q: hello\nD: the l") and text.endswith("<|end|>")


@pytest.mark.parametrize("spec", [*KINDS.values(), PoolingSpec(token_logits=False)])
def test_a_document_that_is_cut_may_have_any_length(folders: dict[str, Path], spec: PoolingSpec) -> None:
    pair, most = ("hello", "the lazy dog " * 5000), Truncation(40, first=True)
    _, cut = rank(folders["pairs"], spec, pair=pair, context_length=40, truncation=most)
    assert max(map(len, cut.prompts)) == 40
    with pytest.raises(InvalidRequest, match=r"has 650\d\d bytes"):
        rank(folders["pairs"], spec, pair=pair, context_length=40)
    with pytest.raises(InvalidRequest, match="the query has 65000 bytes"):
        rank(folders["pairs"], KINDS["head"], pair=pair[::-1], context_length=40, truncation=most)


def test_answers_that_the_prompt_does_not_ask_for_are_refused(folders: dict[str, Path]) -> None:
    words = "answers with the tokens 41 and 42, .* has no roles query and document"
    with pytest.raises(InvalidRequest, match=words):
        rank(folders["chats"], KINDS["answers"])
    ids = tuple(load_tokenizer(str(folders["chats"])).encode(word)[0] for word in ("yes", "no"))
    _, ranking = rank(folders["chats"], PoolingSpec(answer_ids=ids))
    assert ranking.pooling.label_ids == ids


def test_without_activation_a_score_is_the_difference_of_the_logits(folders: dict[str, Path]) -> None:
    yields = [Pooled(b"", (3.0, 1.0))]
    _, ranking = rank(folders["pairs"], PoolingSpec(answer_ids=(41, 42), activation="none"))
    assert ranking.values(yields) == [2.0]
    _, ranking = rank(folders["pairs"], KINDS["answers"])
    assert ranking.values(yields) == [pytest.approx(0.8808, abs=1e-4)]


def test_a_query_or_instruction_that_never_fits_is_refused_before_all_prompts_are_made(
    folders: dict[str, Path],
) -> None:
    tokenizer, begun = load_tokenizer(str(folders["pairs"])), list[str]()

    def pairs(query: str) -> Any:
        for document in ("one", "two", "three"):
            begun.append(document)
            yield query, document

    for kind in KINDS.values():
        with pytest.raises(InvalidRequest, match="the instruction has 65000 bytes"):
            ranking_of(tokenizer, kind, pairs("hello"), "lazy dogs, " * 5909 + "d", context_length=40)
        assert not begun
        with pytest.raises(InvalidRequest, match=r"the prompt has \d\d\d tokens"):
            ranking_of(tokenizer, kind, pairs("the lazy dog " * 99), context_length=40)
        assert begun == ["one"]
        begun.clear()
    assert num_chars_of([PAIR] * 100, "Find" * 100) > 100 * 400, "it is tokenized with each pair"
