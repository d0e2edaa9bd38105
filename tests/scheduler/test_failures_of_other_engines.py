"""Failures that users of other engines reported; each has the test that would have caught it."""

from __future__ import annotations

import numpy as np
import pytest

from jaxsgl.messages.orders import Abort
from jaxsgl.requests.request import FinishReason
from jaxsgl.testing.device import FakePageTable
from tests.scheduler.serving import Script, capacity, expected, finish_reason, last_reply, request, serve

both_loops = pytest.mark.parametrize("overlap", [True, False])
both_caches = pytest.mark.parametrize("radix", [True, False])


@both_loops
@both_caches
def test_tokens_are_right_after_a_padded_prefill(overlap: bool, radix: bool) -> None:
    """sglang-jax 1487: padding of a prefill overwrote last tokens of running requests under overlap."""
    prompts = {f"r{i}": list(range(i, i + 17 + i)) for i in range(3)}  # 54 tokens pad to 64, 3 sequences to 8
    late = list(range(500, 533))
    script: Script = [
        [request(key, prompt, 12) for key, prompt in prompts.items()],
        [],
        [],
        [request("late", late, 12)],
    ]
    mailbox, scheduler = serve(capacity(), script, overlap=overlap, radix=radix)
    assert any(inputs.num_tokens < inputs.bucket.num_tokens for inputs in scheduler.launched)
    for key, prompt in [*prompts.items(), ("late", late)]:
        assert mailbox.output_ids(key) == expected(prompt, 12)


@both_loops
def test_pages_freed_while_a_step_is_in_flight_can_be_used_at_once(overlap: bool) -> None:
    """mini-sglang 67, 102: overlap read memory that had been freed. The pool holds one request at a time here."""
    sizes = capacity(num_pages=6, rows=2, context=20)
    stop = expected(range(100, 110), 8)[3]
    script: Script = [
        [request("a", range(100, 110), 8, stop=(stop,)), request("b", range(200, 212), 8)],
        *[[]] * 3,
        [request("c", range(300, 312), 8)],
    ]
    mailbox, _ = serve(sizes, script, overlap=overlap)
    assert mailbox.output_ids("a") == expected(range(100, 110), 8, frozenset({stop}))
    assert mailbox.output_ids("b") == expected(range(200, 212), 8)
    assert mailbox.output_ids("c") == expected(range(300, 312), 8)


def test_decode_never_runs_out_of_pages() -> None:
    """sglang-jax 113: decoding ran out of memory. Admission promises pages up to the end of every request."""
    sizes = capacity(num_pages=20, rows=8, context=64)
    prompts = {f"r{i}": list(range(10 * i, 10 * i + 9)) for i in range(8)}
    mailbox, _ = serve(sizes, [[request(key, prompt, 40) for key, prompt in prompts.items()]])
    for key, prompt in prompts.items():
        assert mailbox.output_ids(key) == expected(prompt, 40)


@both_caches
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_page_padding_is_harmless_in_batches(page_size: int, radix: bool) -> None:
    """sglang-jax 20: padding to pages gave wrong output at batch above 1."""
    sizes = capacity(page_size=page_size, num_pages=20 * (256 // page_size + 1), context=256, max_extend_tokens=50)
    prompts = {f"r{i}": list(range(i, i + 1 + 13 * i)) for i in range(8)}
    mailbox, _ = serve(sizes, [[request(key, prompt, 20) for key, prompt in prompts.items()]], radix=radix)
    for key, prompt in prompts.items():
        assert mailbox.output_ids(key) == expected(prompt, 20)


@both_loops
@pytest.mark.parametrize("length", [1, 4, 8, 9])
def test_a_fully_cached_prompt_is_answered(length: int, overlap: bool) -> None:
    """nano-vllm 144: a prompt that was cached to its last token had nothing left to compute."""
    prompt = list(range(length))
    script: Script = [[request("first", prompt, 8)], *[[]] * 20, [request("again", prompt, 8)]]
    mailbox, _ = serve(capacity(), script, overlap=overlap)
    assert mailbox.output_ids("first") == mailbox.output_ids("again") == expected(prompt, 8)
    assert last_reply(mailbox, "again").cached_tokens == (length - 1) // 4 * 4


@both_loops
@both_caches
def test_two_equal_prompts_in_one_batch(overlap: bool, radix: bool) -> None:
    """nano-vllm 199, 208: equal prompts admitted together computed the same pages twice and freed them once."""
    prompt = list(range(21))
    mailbox, scheduler = serve(
        capacity(), [[request("a", prompt, 9), request("b", prompt, 9)]], overlap=overlap, radix=radix
    )
    assert scheduler.launched[0].num_seqs == 2
    assert mailbox.output_ids("a") == mailbox.output_ids("b") == expected(prompt, 9)


def test_a_request_prefills_again_after_its_cached_pages_were_evicted() -> None:
    """nano-vllm 211: prefill again after losing pages mixed old and new lengths."""
    sizes = capacity(num_pages=9, rows=1, context=32)
    prompt, other = list(range(20)), list(range(300, 320))
    script: Script = [
        [request("first", prompt, 8)], *[[]] * 12,
        [request("other", other, 8)], *[[]] * 12,
        [request("again", prompt, 8)],
    ]  # fmt: skip
    mailbox, _ = serve(sizes, script)
    assert mailbox.output_ids("first") == mailbox.output_ids("again") == expected(prompt, 8)
    assert mailbox.output_ids("other") == expected(other, 8)
    assert last_reply(mailbox, "again").cached_tokens < 19


@both_loops
def test_an_unfinished_request_drops_its_duplicate_pages(overlap: bool) -> None:
    """mini-sglang 142: a request between chunks kept page-table entries to duplicates that had been freed."""
    sizes = capacity(max_extend_tokens=16)
    prompt = list(range(60))
    script: Script = [
        [request("a", prompt, 10)],
        [request("b", [*prompt[:50], 7], 10)],
        [request("c", prompt, 10)],
    ]
    mailbox, scheduler = serve(sizes, script, overlap=overlap)
    table = FakePageTable(sizes)
    for inputs in scheduler.launched:  # a row of a batch names a slot once at most
        table.update(inputs)
        for row, length in zip(inputs.arrays.rows[: inputs.num_seqs], inputs.arrays.lengths, strict=False):
            assert len(np.unique(table.slots(row, length))) == length
    assert mailbox.output_ids("a") == mailbox.output_ids("c") == expected(prompt, 10)
    assert mailbox.output_ids("b") == expected([*prompt[:50], 7], 10)


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "message"),
    [
        (128, 1, "the prompt has 128 tokens, but this model's maximum context length is 128"),
        (1000, None, "the prompt has 1000 tokens"),
        (60, 60, "need 120 tokens of KV cache .* the whole pool holds 96"),
        (0, 5, "the prompt is empty"),
    ],
)
def test_a_request_that_can_never_fit_is_answered_with_an_error(
    prompt_len: int, max_tokens: int | None, message: str
) -> None:
    """mini-sglang: over-long prompts were dropped without a reply."""
    sizes = capacity(num_pages=25)
    mailbox, _ = serve(sizes, [[request("bad", range(prompt_len), max_tokens), request("good", range(9), 6)]])
    reply = last_reply(mailbox, "bad")
    assert reply.refusal is not None
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(reply.refusal)
    assert mailbox.output_ids("good") == expected(range(9), 6)


@both_loops
@pytest.mark.parametrize("turns", range(9))
def test_a_disconnect_at_any_moment_leaves_nothing_behind(turns: int, overlap: bool) -> None:
    """sglang 36333 (zombies after a disconnect), 39216 (a disconnect kills the engine)."""
    sizes = capacity(max_extend_tokens=16, rows=2)
    prompt = list(range(40))  # three chunks, then decode; the third request waits for a row
    script: Script = [
        [request("gone", prompt, 30), request("stays", range(50, 60), 9), request("waits", range(70, 99), 9)],
        *[[]] * turns,
        [Abort("gone"), Abort("waits"), Abort("unknown")],
    ]
    mailbox, _ = serve(sizes, script, overlap=overlap)
    assert finish_reason(mailbox, "gone") is FinishReason.ABORT
    assert finish_reason(mailbox, "waits") is FinishReason.ABORT
    assert mailbox.output_ids("gone") == expected(prompt, 30)[: len(mailbox.output_ids("gone"))]
    assert mailbox.output_ids("stays") == expected(range(50, 60), 9)
