from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fake_engine_process import EOS_ID, VOCAB_SIZE, Script
from http_calls import chunks, connect, post, refusal
from server_process import ServerProcess, wait_for
from tokenizers import processors

from jaxsgl.frontend.http.openai.logprobs import Echo, LogprobsWriter
from jaxsgl.frontend.proto import jaxsgl_pb2 as pb
from jaxsgl.frontend.proto import jaxsgl_pb2_grpc as pb_grpc
from jaxsgl.messages.replies import TokenLogprob
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.text.tokenizer import Tokenizer, load_tokenizer
from tests.text.small_tokenizers import KINDS, byte_fallback, save

PATH = "/v1/completions"


@pytest.fixture(scope="module")
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with connect(server) as http:
        yield http


def texts(answer: dict[str, Any]) -> list[str]:
    assert [choice["index"] for choice in answer["choices"]] == list(range(len(answer["choices"])))
    return [choice["text"] for choice in answer["choices"]]


def streamed(all_chunks: list[dict[str, Any]], num_choices: int) -> list[str]:
    joined = [""] * num_choices
    for chunk in all_chunks:
        for choice in chunk["choices"]:
            joined[choice["index"]] += choice["text"]
    return joined


def test_an_answer_has_all_fields_of_openai(http: httpx.Client, model_folder: str) -> None:
    answer = post(http, PATH, prompt="hello world", max_tokens=3)
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["model"] == Path(model_folder).name
    assert answer["created"] > 1_700_000_000
    stops = {"matched_stop": None, "stop_reason": None}
    assert answer["choices"] == [
        {"index": 0, "text": "hello world", "logprobs": None, "finish_reason": "length"} | stops
    ]
    assert answer["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": 3,
        "total_tokens": 6,
        "prompt_tokens_details": {"cached_tokens": 1},
    }


@pytest.mark.parametrize("prompt", [[50, 60, 70], [[50, 60, 70]]])
def test_prompts_may_be_token_ids(http: httpx.Client, tokenizer: Tokenizer, prompt: object) -> None:
    assert texts(post(http, PATH, prompt=prompt, max_tokens=3)) == [tokenizer.decode([50, 60, 70])]


def test_a_pattern_ends_the_answer_with_its_match(http: httpx.Client) -> None:
    body = {"prompt": "hello world", "max_tokens": 3, "stop_regex": ["[A-Z]", "w.r"]}
    (choice,) = post(http, PATH, **body)["choices"]
    assert (choice["text"], choice["finish_reason"], choice["matched_stop"]) == ("hello wor", "stop", "w.r")
    assert streamed(chunks(http, PATH, **body), 1) == ["hello wor"]
    sampling = {"max_new_tokens": 3, "stop_regex": "w.r"}
    answer = post(http, "/generate", text="hello world", sampling_params=sampling)
    assert answer["text"] == "hello wor"
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "w.r"}
    assert "stop_regex '(a' can't be used: " in refusal(http, PATH, prompt="a", stop_regex="(a")["message"]


def test_prompts_are_cut_to_their_last_tokens_or_to_their_first(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = list(range(30, 280))

    def kept(**fields: Any) -> list[str]:
        return texts(post(http, PATH, prompt=ids, max_tokens=0, echo=True, **fields))

    assert kept(truncate_prompt_tokens=3) == [tokenizer.decode(ids[-3:])]
    assert kept(truncate_prompt_tokens=3, truncation_side="right") == [tokenizer.decode(ids[:3])]
    assert kept(truncate_prompt_tokens=-1) == [tokenizer.decode(ids[-159:])], "a pool of 160 less a new token"
    usage = post(http, PATH, prompt=ids, truncate_prompt_tokens=-1, max_tokens=120)["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (40, 120)
    ids = tokenizer.encode("hello world, hello you")
    echoed = post(http, PATH, prompt="hello world, hello you", truncate_prompt_tokens=2, max_tokens=2, echo=True)
    assert texts(echoed) == [2 * tokenizer.decode(ids[-2:])]
    assert texts(post(http, PATH, prompt="abc", truncate_prompt_tokens=100, max_tokens=3)) == ["abc"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0, but must be -1, or 1 to 160"),
        ({"truncate_prompt_tokens": 161}, "but must be -1, or 1 to 160"),
        ({"truncate_prompt_tokens": -2}, "greater than or equal to -1"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 160}, "max_tokens=160 leaves no room"),
    ],
)
def test_a_truncation_that_keeps_nothing_is_refused(http: httpx.Client, fields: dict[str, Any], words: str) -> None:
    assert words in refusal(http, PATH, prompt="abc", **fields)["message"]


def test_choices_are_numbered_prompt_by_prompt(http: httpx.Client) -> None:
    answer = post(http, PATH, prompt=["abc", "xyz"], max_tokens=3, n=2)
    assert texts(answer) == ["abc", "bca", "xyz", "yzx"]  # sample 1 of the fake engine starts one id later
    assert answer["usage"]["prompt_tokens"] == 6
    assert answer["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("logprobs", [None, 2])
def test_a_stream_says_the_same_as_a_whole_answer(http: httpx.Client, echo: bool, logprobs: int | None) -> None:
    body = {"prompt": ["hello Köln", "<="], "max_tokens": 7, "n": 3, "echo": echo, "logprobs": logprobs}
    whole = post(http, PATH, **body)
    parts = chunks(http, PATH, **body)
    assert streamed(parts, 6) == texts(whole)
    for choice in whole["choices"]:
        of_choice = [part["choices"][0] for part in parts if part["choices"][0]["index"] == choice["index"]]
        assert [part["finish_reason"] for part in of_choice] == [None] * (len(of_choice) - 1) + ["length"]
        if logprobs is None:
            assert all(part["logprobs"] is None for part in of_choice)
            continue
        for name, values in choice["logprobs"].items():
            assert [value for part in of_choice for value in part["logprobs"][name]] == values, name


def test_all_chunks_of_a_stream_have_one_head_and_no_usage(http: httpx.Client) -> None:
    parts = chunks(http, PATH, prompt="hello", max_tokens=3)
    assert len({(part["id"], part["object"], part["created"], part["model"]) for part in parts}) == 1
    assert parts[0]["object"] == "text_completion"
    assert all("usage" not in part for part in parts)


def test_a_stream_ends_with_its_usage_if_asked(http: httpx.Client) -> None:
    *parts, last = chunks(http, PATH, prompt=["hello", "abc"], max_tokens=3, stream_options={"include_usage": True})
    assert all(part["usage"] is None for part in parts)
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (4, 6)


@pytest.mark.parametrize("echo", [False, True])
def test_each_chunk_of_a_stream_has_the_usage_of_its_choice_so_far_if_asked(http: httpx.Client, echo: bool) -> None:
    body = {"prompt": ["hello Köln", "<="], "max_tokens": 7, "n": 3, "echo": echo, "logprobs": 0}
    whole = post(http, PATH, **body)
    both = {"include_usage": True, "continuous_usage_stats": True}
    *parts, last = chunks(http, PATH, **body, stream_options=both)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    told = [0] * 6  # tokens, by their log-probabilities
    for part in parts:
        (choice,), usage = part["choices"], part["usage"]
        told[choice["index"]] += len(choice["logprobs"]["tokens"])
        of_prompt = usage["prompt_tokens"] if echo else 0
        assert usage["completion_tokens"] == told[choice["index"]] - of_prompt
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    ends = {part["choices"][0]["index"]: part["usage"] for part in parts}
    assert {usage["completion_tokens"] for usage in ends.values()} == {7}
    of_first, of_second = ends[0], ends[3]
    assert of_first["prompt_tokens"] + of_second["prompt_tokens"] == whole["usage"]["prompt_tokens"]
    assert of_first == ends[1] == ends[2]
    assert of_first["prompt_tokens_details"]["cached_tokens"] == of_first["prompt_tokens"] // 2


def test_the_usage_in_chunks_counts_tokens_that_gave_no_text(http: httpx.Client) -> None:
    """A character is three tokens here; a chunk may end within one, as replies that wait are merged."""
    stream_options = {"continuous_usage_stats": True}
    text, counts = "", []
    for part in chunks(http, PATH, prompt="龘龘", max_tokens=6, stream_options=stream_options):
        text += part["choices"][0]["text"]
        counts.append(part["usage"]["completion_tokens"])
        assert counts[-1] // 3 == len(text)
    assert text == "龘龘"
    assert counts == sorted(counts)
    assert counts[-1] == 6


def test_echo_puts_the_prompt_before_the_text(http: httpx.Client, tokenizer: Tokenizer) -> None:
    assert texts(post(http, PATH, prompt="hello ", max_tokens=1, echo=True)) == ["hello hello"]
    of_ids = post(http, PATH, prompt=[50, 60], max_tokens=2, echo=True)
    assert texts(of_ids) == [tokenizer.decode([50, 60, 50, 60])]


def test_logprobs_have_the_form_of_openai(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("abc")
    (choice,) = post(http, PATH, prompt="abc", max_tokens=3, logprobs=2)["choices"]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == ["a", "b", "c"]
    assert logprobs["token_logprobs"] == [-id / 8 for id in ids]
    following = {"a": "b", "b": "c", "c": "d"}  # their ids are consecutive; the fake names two, one less likely
    assert logprobs["top_logprobs"] == [
        {token: -id / 8, following[token]: -id / 8 - 1} for token, id in zip("abc", ids, strict=True)
    ]
    assert logprobs["text_offset"] == [0, 1, 2]


def test_an_echoed_prompt_is_scored_without_its_first_token(http: httpx.Client, tokenizer: Tokenizer) -> None:
    (choice,) = post(http, PATH, prompt="hello world", max_tokens=1, logprobs=0, echo=True)["choices"]
    ids = tokenizer.encode("hello world")
    assert choice["logprobs"]["tokens"] == ["hello", " wor", "ld", "hello"]
    assert choice["logprobs"]["token_logprobs"] == [None, -ids[1] / 8, -ids[2] / 8, -ids[0] / 8]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["top_logprobs"][1] == {" wor": -ids[1] / 8}
    assert choice["logprobs"]["text_offset"] == [0, 5, 9, 11]


def test_max_tokens_of_0_scores_the_prompt_alone(http: httpx.Client) -> None:
    answer = post(http, PATH, prompt=["hello world", "a"], max_tokens=0, logprobs=1, echo=True)
    first, second = answer["choices"]
    assert first["text"] == "hello world"
    assert first["logprobs"]["tokens"] == ["hello", " wor", "ld"]
    assert first["finish_reason"] == "length"
    assert second["logprobs"]["token_logprobs"] == [None]
    assert answer["usage"]["completion_tokens"] == 0
    assert "echo" in refusal(http, PATH, prompt="hello", max_tokens=0)["message"]


def test_text_offsets_count_characters_even_where_tokens_split_one(http: httpx.Client) -> None:
    (choice,) = post(http, PATH, prompt="a龘b🙂<|start|>c", max_tokens=30, logprobs=0)["choices"]
    logprobs = choice["logprobs"]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        if not token.startswith(("\\x", "<|")):
            assert choice["text"][offset : offset + len(token)] == token
    assert "<|start|>" in logprobs["tokens"]
    assert logprobs["tokens"][1:4] == ["\\xe9", "\\xbe", "\\x98"]  # of 龘


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("echo", [True, False])
def test_text_offsets_count_special_tokens_that_are_in_the_text(http: httpx.Client, skip: bool, echo: bool) -> None:
    body = {"prompt": "<|start|>hello<|start|>a龘b", "max_tokens": 9, "logprobs": 0, "ignore_eos": True}
    (choice,) = post(http, PATH, **body, skip_special_tokens=skip, echo=echo)["choices"]
    logprobs, text = choice["logprobs"], choice["text"]
    assert ("<|start|>" in text) == (echo or not skip)
    num_prompt = len(logprobs["tokens"]) - 9
    for number, (token, offset) in enumerate(zip(logprobs["tokens"], logprobs["text_offset"], strict=True)):
        is_hidden = skip and token == "<|start|>" and number >= num_prompt
        if not token.startswith("\\x") and not is_hidden:
            assert text[offset : offset + len(token)] == token, number
    assert "<|start|>" in logprobs["tokens"][num_prompt:]


def test_echoed_ids_have_special_tokens_if_asked(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("<|start|>a龘b")
    body = {"prompt": ids, "max_tokens": 1, "logprobs": 0, "echo": True}
    for skip, text in ((False, "<|start|>a龘b"), (True, "a龘b")):
        (choice,) = post(http, PATH, **body, skip_special_tokens=skip)["choices"]
        assert choice["text"].startswith(text)
        assert choice["logprobs"]["text_offset"][len(ids) - 1] == len(text) - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["<|start|>user\nhello é🙂 world <|end|> you", " a  <|end|>b", "é", "<|end|>"])
def test_an_echoed_text_has_its_tokens_where_it_was_written_so(kind: str, text: str, tmp_path: Path) -> None:
    """Tokenizers put spaces into texts: a token may begin with one that isn't there."""
    tokenizer = load_tokenizer(save(KINDS[kind](), tmp_path))
    ids = [tokenizer.encode("<|start|>")[0], *tokenizer.encode(text, add_special_tokens=False)]
    writer = LogprobsWriter(tokenizer, Request("r", ids, SamplingParams(skip_special_tokens=False)))
    echoed = writer.prompt(ids, [None] * (len(ids) - 1), Echo(text, range(1, len(ids))))
    assert echoed.text_offset[:2] == [0, 0], "the token in front was added"
    for token, offset in list(zip(echoed.tokens, echoed.text_offset, strict=True))[1:]:
        bare = token.lstrip(" ")
        if not token.startswith(("\\x", "<unk>")) and bare:
            assert text[offset:].lstrip(" ").startswith(bare), (token, offset)
    ids = tokenizer.encode("a<|end|> you", add_special_tokens=False)
    output = writer.output(ids, [TokenLogprob(-1.0)] * len(ids))
    assert output.text_offset[0] == len(text)
    end = output.tokens.index("<|end|>")
    assert output.text_offset[end + 1] - output.text_offset[end] == len("<|end|>")


def test_texts_of_a_tokenizer_with_space_marks_keep_their_first_space(
    start_server: Callable[..., ServerProcess], tmp_path: Path
) -> None:
    """Its decoder strips the first space of a text. A start token is put before prompts, and echoed by the fake."""
    made = byte_fallback()
    made.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", made.token_to_id("<|start|>"))]
    )
    server = start_server(model=save(made, tmp_path / "marks"))
    server.wait_until_ready()
    with connect(server) as http:
        num_tokens = post(http, PATH, prompt="hello you", max_tokens=1)["usage"]["prompt_tokens"]
        body = {"prompt": "hello you", "max_tokens": num_tokens, "n": 2, "logprobs": 0, "ignore_eos": True}
        answer = post(http, PATH, **body)
        assert texts(answer) == [" hello you", " hello you"]
        assert streamed(chunks(http, PATH, **body), 2) == texts(answer)
        assert texts(post(http, PATH, **body, echo=True)) == ["hello you hello you"] * 2
        for echo in (True, False):
            for choice in post(http, PATH, **body, echo=echo)["choices"]:
                scored = choice["logprobs"]
                for number, (token, offset) in enumerate(zip(scored["tokens"], scored["text_offset"], strict=True)):
                    token = token.lstrip(" ") if echo and number < 2 else token
                    assert token == "<|start|>" or choice["text"][offset : offset + len(token)] == token
        sampling = {"max_new_tokens": num_tokens, "ignore_eos": True}
        assert post(http, "/generate", text="hello you", sampling_params=sampling)["text"] == " hello you"
        of_ids = post(http, "/tokenize", prompt="hello you", add_special_tokens=False)["tokens"]
        assert texts(post(http, PATH, prompt=of_ids, max_tokens=len(of_ids))) == [" hello you"]
        messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello you"}]
        chat = {"messages": messages, "max_tokens": 9, "ignore_eos": True}
        begun = post(http, "/v1/chat/completions", **chat, continue_final_message=True)
        assert begun["choices"][0]["message"]["content"].startswith(" user")


def test_a_stop_token_and_a_stop_string_are_named(http: httpx.Client) -> None:
    (by_token,) = post(http, PATH, prompt=[66, EOS_ID, 67])["choices"]
    assert (by_token["finish_reason"], by_token["matched_stop"]) == ("stop", EOS_ID)
    assert by_token["stop_reason"] is None, "it is the model's own"
    (by_string,) = post(http, PATH, prompt="hello world", stop="o w")["choices"]
    assert (by_string["text"], by_string["matched_stop"], by_string["stop_reason"]) == ("hell", "o w", "o w")
    (by_other,) = post(http, PATH, prompt="hello world", stop=["o w"], no_stop_trim=True)["choices"]
    assert by_other["text"] == "hello w"
    (by_id,) = post(http, PATH, prompt=[66, 67], stop_token_ids=[67], include_stop_str_in_output=True)["choices"]
    assert (by_id["text"], by_id["matched_stop"], by_id["stop_reason"]) == ("ab", 67, 67)
    last = chunks(http, PATH, prompt=[66, 67], stop_token_ids=[67])[-1]
    assert last["choices"][0]["stop_reason"] == 67
    (ignored,) = post(http, PATH, prompt=[66, EOS_ID, 67], ignore_eos=True, max_tokens=3)["choices"]
    assert ignored["text"] == "ab"


def test_sixteen_tokens_come_if_no_number_is_given(http: httpx.Client) -> None:
    assert post(http, PATH, prompt="a")["usage"]["completion_tokens"] == 16
    assert post(http, PATH, prompt="a", max_tokens=None)["usage"]["completion_tokens"] == 16


def test_an_aborted_choice_ends_as_such(http: httpx.Client, stub: pb_grpc.JaxsglStub) -> None:
    body = {"prompt": [Script.FOREVER], "stream": True, "max_tokens": 150, "logprobs": 0}
    with http.stream("POST", PATH, json=body) as answer:
        parts = (json.loads(line[6:]) for line in answer.iter_lines() if line.startswith("data: {"))
        request_id = next(parts)["id"]
        assert stub.Abort(pb.AbortRequest(request_id=request_id)).found
        assert list(parts)[-1]["choices"][0]["finish_reason"] == "abort"


def test_a_prompt_echoed_for_a_request_that_never_ran_has_no_scores(http: httpx.Client) -> None:
    body = {"prompt": [Script.HANG, 5, 6], "echo": True, "logprobs": 1, "n": 2, "max_tokens": 3}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(post, http, PATH, **body)
        wait_for(lambda: http.post("/abort_request", json={"abort_all": True}).json()["num_aborted"], "the request")
    for choice in answer.result()["choices"]:
        assert choice["finish_reason"] == "abort"
        assert len(choice["logprobs"]["tokens"]) == 3 and choice["text"] == "".join(choice["logprobs"]["tokens"])
        assert choice["logprobs"]["token_logprobs"] == choice["logprobs"]["top_logprobs"] == [None] * 3


def test_a_request_that_the_engine_refuses_has_its_status_even_if_streamed(http: httpx.Client) -> None:
    for stream in (False, True):
        body = {"prompt": [[Script.HANG], [Script.REFUSE, 1]], "stream": stream, "max_tokens": 1}
        overloaded = http.post(PATH, json=body)
        assert overloaded.status_code == 429
        assert overloaded.headers["retry-after"]
        assert overloaded.json()["error"]["message"] == "the scheduler refuses this: overloaded"


def test_one_prompt_that_is_refused_ends_the_others(http: httpx.Client) -> None:
    seen, aborted = counts(http)
    assert http.post(PATH, json={"prompt": [[Script.HANG], [Script.REFUSE]]}).status_code == 400
    assert counts(http) == (seen + 3, aborted + 1)


def test_an_engine_that_dies_ends_a_stream_of_several_prompts_with_an_error(
    start_server: Callable[..., ServerProcess],
) -> None:
    server = start_server()
    server.wait_until_ready()
    body = {"prompt": [[Script.FOREVER], [Script.FAIL]], "stream": True, "max_tokens": 150, "logprobs": 0}
    with connect(server) as http, http.stream("POST", PATH, json=body) as answer:
        assert answer.status_code == 200
        *parts, last = [json.loads(line[6:]) for line in answer.iter_lines() if line]
    # One token of each came before, but the error of one may be sent before the other's token.
    assert {part["choices"][0]["index"] for part in parts} in ({0}, {1}, {0, 1})
    assert last["error"]["type"] == "server_error"
    assert "failed as told" in last["error"]["message"]


def counts(http: httpx.Client) -> tuple[int, int]:
    """Returns (requests the engine has ever seen, samples ever aborted). No request may be running."""
    ids = post(http, PATH, prompt=[Script.REPORT], max_tokens=3, logprobs=0)["choices"][0]["logprobs"]
    running, seen, aborted = (round(-8 * logprob) for logprob in ids["token_logprobs"])
    assert running == 0
    return seen, aborted


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"prompt": None}, "prompt", "must be a text, a list of texts"),
        ({"prompt": 5}, "prompt", "must be a text, a list of texts"),
        ({"prompt": ["a", 5]}, "prompt", "must be a text, a list of texts"),
        ({"prompt": [[1], [True]]}, "prompt", "must be a text, a list of texts"),
        ({"prompt": []}, None, "the prompt is empty"),
        ({"prompt": [[50], []]}, None, "the prompt is empty"),
        ({"prompt": ""}, None, "text is empty"),
        ({"prompt": [VOCAB_SIZE]}, None, "ids go from 0 to 999"),
        ({"prompt": [10**30]}, None, "ids go from 0 to 999"),
        ({"prompt": [5] * 200}, None, "maximum context length is 200 tokens"),
        ({"prompt": ["a"] * 520, "n": 2}, None, "1040 choices"),
        ({"suffix": "end"}, None, "the model's tokenizer has no tokens to fill in the middle"),
        ({"best_of": 1, "n": 2}, None, "best_of is 1, but n=2"),
        ({"best_of": 3, "n": 2, "stream": True}, None, "shows when all have ended: leave stream out"),
        ({"best_of": 0}, "best_of", "greater than or equal to 1"),
        ({"best_of": 129}, "best_of", "less than or equal to 128"),
        ({"prompt": ["a"] * 520, "best_of": 2}, None, "1040 choices"),
        ({"n": 0}, "n", "greater than or equal to 1"),
        ({"n": 129}, "n", "less than or equal to 128"),
        ({"max_tokens": -1}, "max_tokens", "greater than or equal to 0"),
        ({"max_tokens": 10**30}, "max_tokens", "less than or equal to"),
        ({"max_tokens": "many"}, "max_tokens", "valid integer"),
        ({"max_tokens": 2.5}, "max_tokens", "valid integer"),
        ({"temperature": -1}, "temperature", "greater than or equal to 0"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"top_k": -2}, "top_k", "greater than or equal to -1"),
        ({"logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x.[key]", "should match pattern"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
        ({"logit_bias": {"1000": 1}}, None, "ids go from 0 to 999"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"stop": ["a"] * 65}, "stop", "up to 64 texts"),
        ({"stop": [""]}, None, "the length of a stop string is 0"),
        ({"stop": ["a" * 256] * 17}, None, "the length of all stop strings is 4352"),
        ({"stop": {"a": 1}}, "stop", "must be a text"),
        ({"stop_token_ids": [1000]}, None, "ids go from 0 to 999"),
        ({"min_tokens": 20}, None, "max_tokens=16 at most"),
        ({"stream": "yes"}, "stream", "valid boolean"),
        ({"stream_options": {"include_usage": True}}, None, "set stream to true"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "valid boolean"),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": "all"}},
            "stream_options.continuous_usage_stats",
            "valid boolean",
        ),
        ({"guided_json": {"type": "object"}, "regex": "a"}, None, "guided_json and regex each ask for a grammar"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name(
    http: httpx.Client, fields: dict[str, Any], param: str | None, words: str
) -> None:
    error = refusal(http, PATH, **({"prompt": "hello"} | fields))
    assert words in error["message"]
    assert error["param"] == param


def test_editors_send_dozens_of_stop_strings(http: httpx.Client) -> None:
    """Continue sends the special tokens of a model's template, and the words that begin a block in a language."""
    stop = [f"<|{number}|>" for number in range(64)]
    assert http.post(PATH, json={"prompt": "hello", "stop": stop}).status_code == 200


def test_null_means_the_default_and_unknown_fields_are_ignored(http: httpx.Client) -> None:
    names = (
        "model n stream stream_options temperature top_p top_k min_p frequency_penalty presence_penalty logit_bias "
        "repetition_penalty seed stop stop_token_ids min_tokens ignore_eos logprobs best_of suffix echo user"
    )
    fields = dict.fromkeys(names.split())
    answer = post(http, PATH, prompt="abc", max_tokens=3, **fields, colour="blue", priority=3)
    assert texts(answer) == ["abc"]


def test_fields_of_other_engines_are_accepted(http: httpx.Client) -> None:
    answer = post(
        http,
        PATH,
        prompt="abc",
        model="default",
        max_tokens=3,
        temperature=0,
        top_k=-1,
        top_p=1,
        min_p=0.5,
        seed=-1,
        frequency_penalty=-2,
        presence_penalty=2,
        repetition_penalty=1.5,
        logit_bias={"5": -100, "007": 3.5},
        min_tokens=2,
        best_of=1,
        user="me",
        suffix="",
    )
    assert texts(answer) == ["abc"]
