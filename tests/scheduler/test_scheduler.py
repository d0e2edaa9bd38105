from __future__ import annotations

import pytest

from jaxsgl.requests.request import MAX_MIN_TOKENS, FinishReason, Request, SamplingParams
from jaxsgl.testing.engine import FakeEngine, generate
from tests.checked import sampling_of
from tests.scheduler.serving import (
    VOCAB,
    capacity,
    expected,
    finish_reason,
    last_reply,
    new_scheduler,
    request,
    serve,
)  # fmt: skip


def test_prefill_goes_before_decode_and_requests_go_in_order_of_arrival() -> None:
    sizes = capacity(rows=2)
    script = [[request(key, range(i, i + 5), 6) for i, key in enumerate("abc")], [], [request("d", range(50, 59), 6)]]
    mailbox, scheduler = serve(sizes, script)
    assert [inputs.bucket.kind for inputs in scheduler.launched[:2]] == ["extend", "decode"]
    firsts = list(dict.fromkeys(reply.request_id for reply in mailbox.replies))
    assert firsts == ["a", "b", "c", "d"]


def test_a_long_prompt_is_computed_in_chunks_that_end_on_page_borders() -> None:
    sizes = capacity(page_size=4, max_extend_tokens=18)
    mailbox, scheduler = serve(sizes, [[request("a", range(51), 3)]])
    extends = [inputs.num_tokens for inputs in scheduler.launched if inputs.bucket.kind == "extend"]
    assert extends == [16, 16, 16, 3]
    assert mailbox.output_ids("a") == expected(range(51), 3)


def test_a_chunk_budget_below_the_page_size_still_progresses() -> None:
    sizes = capacity(page_size=16, num_pages=40, max_extend_tokens=5)
    mailbox, scheduler = serve(sizes, [[request("a", range(33), 3)]])
    assert max(inputs.num_tokens for inputs in scheduler.launched) == 5
    assert mailbox.output_ids("a") == expected(range(33), 3)


def test_the_rest_of_a_chunk_budget_goes_to_the_next_request() -> None:
    sizes = capacity(max_extend_tokens=32)
    _, scheduler = serve(sizes, [[request("a", range(20), 2), request("b", range(50, 90), 2)]])
    assert (scheduler.launched[0].num_seqs, scheduler.launched[0].num_tokens) == (2, 32)


@pytest.mark.parametrize("overlap", [True, False])
def test_every_eos_and_stop_token_ends_a_request_unless_ignored(overlap: bool) -> None:
    prompt = list(range(12))
    plain = expected(prompt, 10)
    sizes = capacity()
    scheduler = new_scheduler(sizes, eos=(plain[6], plain[4]))
    params = {
        "eos": SamplingParams(temperature=0, max_tokens=10),
        "stop": SamplingParams(temperature=0, max_tokens=10, stop_token_ids=(plain[2],)),
        "ignored": SamplingParams(temperature=0, max_tokens=10, ignore_eos=True),
        "ignored but stopped": SamplingParams(
            temperature=0, max_tokens=10, ignore_eos=True, stop_token_ids=(plain[7],)
        ),
    }
    scheduler.receive([Request(key, prompt, value) for key, value in params.items()])
    engine, handles, replies = FakeEngine(sizes), [], []
    while not scheduler.is_idle:
        inputs = scheduler.launch()
        if inputs is not None:
            handles.append(engine.submit(inputs))
        if handles and (inputs is None or len(handles) > int(overlap)):
            scheduler.collect(handles.pop(0).tokens())
        replies += scheduler.take_replies()
    outputs = {key: [t for r in replies if r.request_id == key for t in r.token_ids] for key in params}
    reasons = {r.request_id: r.finish_reason for r in replies if r.finish_reason}
    assert outputs == {
        "eos": plain[:5],
        "stop": plain[:3],
        "ignored": plain,
        "ignored but stopped": plain[:8],
    }
    assert reasons == {
        "eos": FinishReason.STOP,
        "stop": FinishReason.STOP,
        "ignored": FinishReason.LENGTH,
        "ignored but stopped": FinishReason.STOP,
    }


@pytest.mark.parametrize("max_tokens", [None, 1_000_000])
def test_output_that_does_not_fit_the_context_is_capped_and_reported_as_length(max_tokens: int | None) -> None:
    mailbox, _ = serve(capacity(context=64), [[request("a", range(50), max_tokens)]])
    assert mailbox.output_ids("a") == expected(range(50), 14)
    assert finish_reason(mailbox, "a") is FinishReason.LENGTH


def test_a_prefix_is_reused_while_its_first_owner_still_runs() -> None:
    prefix = list(range(32))
    script = [[request("a", [*prefix, 1], 40)], [], [request("b", [*prefix, 2], 4)]]
    mailbox, _ = serve(capacity(), script)
    assert last_reply(mailbox, "b").cached_tokens == 32
    assert mailbox.output_ids("b") == expected([*prefix, 2], 4)


def test_output_of_a_finished_request_is_cached_for_the_next_turn() -> None:
    prompt = list(range(10))
    turn = [*prompt, *expected(prompt, 10)]
    script = [[request("a", prompt, 10)], *[[]] * 20, [request("b", [*turn, 5, 6], 3)]]
    mailbox, _ = serve(capacity(), script)
    assert last_reply(mailbox, "b").cached_tokens == 16  # 19 tokens have KV, in whole pages of 4
    assert mailbox.output_ids("b") == expected([*turn, 5, 6], 3)


def test_requests_wait_for_rows_and_none_starves() -> None:
    sizes = capacity(rows=3)
    prompts = {f"r{i:02}": list(range(i, i + 1 + i % 7)) for i in range(40)}
    mailbox, scheduler = serve(sizes, [[request(k, p, 5)] for k, p in prompts.items()])
    assert max(inputs.num_seqs for inputs in scheduler.launched) <= 3
    ends = [reply.request_id for reply in mailbox.replies if reply.finish_reason]
    assert ends == sorted(prompts)
    for key, prompt in prompts.items():
        assert mailbox.output_ids(key) == expected(prompt, 5)


def test_a_large_request_at_the_head_is_not_overtaken_forever() -> None:
    sizes = capacity(num_pages=17, rows=4, context=64)
    small = [[request(f"s{i}", range(i, i + 4), 8)] for i in range(30)]
    small[3].append(request("large", range(500, 540), 20))
    mailbox, _ = serve(sizes, small)
    ends = [reply.request_id for reply in mailbox.replies if reply.finish_reason]
    assert ends.index("large") < ends.index("s20")


def test_seeds_of_requests_without_one_follow_from_the_servers_seed() -> None:
    def seeds(random_seed: int) -> list[int]:
        from jaxsgl.batch.buckets import BucketSet
        from jaxsgl.scheduler.scheduler import Scheduler

        sizes = capacity()
        scheduler = Scheduler(sizes, BucketSet.derive(sizes), (), random_seed=random_seed)
        scheduler.receive([Request(str(i), [1, 2], SamplingParams(temperature=1.0)) for i in range(3)])
        inputs = scheduler.launch()
        assert inputs is not None
        return sampling_of(inputs).seeds[:3].tolist()

    assert seeds(1) == seeds(1)
    assert seeds(1) != seeds(2)
    assert len(set(seeds(1))) == 3


def test_greedy_batches_take_a_program_without_the_sampling_code() -> None:
    sizes = capacity()
    scheduler = new_scheduler(sizes)
    scheduler.receive([Request("a", [1], SamplingParams(temperature=0)), Request("b", [1], SamplingParams(top_k=1))])
    inputs = scheduler.launch()
    assert inputs is not None
    assert not inputs.bucket.sampled
    scheduler.receive(
        [Request("c", [1], SamplingParams(temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=2**32 - 1))]
    )
    inputs = scheduler.launch()
    assert inputs is not None
    assert inputs.bucket.sampled
    sampling = sampling_of(inputs)
    assert (sampling.top_k[0], sampling.seeds[0]) == (7, -1)
    assert sampling.temperature[0] == 0.5
    assert sampling.top_p.tolist()[0] == pytest.approx(0.9)
    assert sampling.min_p.tolist()[0] == pytest.approx(0.1)


def test_batches_are_read_only() -> None:
    scheduler = new_scheduler(capacity())
    scheduler.receive([request("a", range(5))])
    inputs = scheduler.launch()
    assert inputs is not None
    with pytest.raises(ValueError, match="read-only"):
        inputs.arrays.token_ids[0] = VOCAB


def test_min_tokens_of_any_size_holds_the_end_back_to_the_end_of_the_context() -> None:
    sizes = capacity(context=64)
    prompt = list(range(12))
    stop = expected(prompt, 10)[3]
    params = SamplingParams(temperature=0, min_tokens=MAX_MIN_TOKENS, stop_token_ids=(stop,))
    mailbox, _ = serve(sizes, [[Request("a", prompt, params), request("b", range(50, 60))]])
    assert mailbox.output_ids("a") == generate(prompt, 64 - 12, frozenset({stop}), VOCAB, MAX_MIN_TOKENS)
    assert finish_reason(mailbox, "a") is FinishReason.LENGTH
    assert mailbox.output_ids("b") == expected(range(50, 60))
