"""How long steps take that sleep on each pipeline stage. A program: JAX has one number of devices per process.

python -m tests.engine.stage_times FOLDER STAGES > times.json

Prints seconds, of which a stage sleeps `STAGE_S` in each step: of a decode step of many, of the first token of a prompt
of one chunk and of one of `NUM_CHUNKS`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax

from jaxsgl.config.engine import EngineConfig
from jaxsgl.engine import step, step_programs
from jaxsgl.engine.stages import programs as stage_programs
from jaxsgl.messages.orders import News, ToEngine
from jaxsgl.messages.replies import Replies
from jaxsgl.requests.request import Request, SamplingParams
from jaxsgl.scheduler.loop import run_loop
from jaxsgl.testing.engine import ScriptedMailbox
from jaxsgl.wiring import build

STAGE_S = 0.2  # of which other programs that take the processors are a small part
CHUNK, NUM_CHUNKS, NUM_TOKENS, ROWS = 16, 8, 8, 8


class Timed(ScriptedMailbox):
    """Notes when tokens come."""

    def __init__(self, script: list[list[ToEngine]]) -> None:
        super().__init__(script)
        self.came_s: list[float] = []

    def send(self, news: News) -> None:
        super().send(news)
        if isinstance(news, Replies) and any(reply.token_ids for reply in news.replies):
            self.came_s.append(time.perf_counter())


def asleep(x: jax.Array, stage_s: float) -> jax.Array:
    """`x`, after so many seconds on the device."""

    def sleep(x: Any) -> Any:
        time.sleep(stage_s)
        return x

    slept: jax.Array = jax.pure_callback(sleep, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return slept


def sleeping(make: Callable[..., Any], field: str, stage_s: float) -> Callable[..., Any]:
    """`make_passing` or `make_forward`, whose programs sleep before they have `field`."""

    def made(*arguments: Any) -> Any:
        program = make(*arguments)

        def sleeper(*values: Any) -> Any:
            out = program(*values)
            return out._replace(**{field: asleep(getattr(out, field), stage_s)})

        return sleeper

    return made


def plant(stage_s: float) -> None:
    """Has the programs of all stages that are made from now on sleep so many seconds."""
    stage_programs.make_passing = sleeping(step.make_passing, "stream", stage_s)  # type: ignore[attr-defined]
    step_programs.make_forward = sleeping(step.make_forward, "logits", stage_s)  # type: ignore[attr-defined]


def main() -> None:
    folder, num_stages = sys.argv[1], int(sys.argv[2])
    jax.config.update("jax_num_cpu_devices", num_stages)
    plant(STAGE_S)
    config = EngineConfig(
        model=folder,
        load_format="dummy",
        pp_size=num_stages,
        page_size=4,
        chunked_prefill_size=CHUNK,
        context_length=2 * CHUNK * NUM_CHUNKS,
        max_running_requests=ROWS,
        max_total_tokens=2000,
        decode_buckets=(ROWS,),
        extend_buckets=(CHUNK,),
        grammar_backend="none",
        compilation_cache_dir="",
        disable_radix_cache=True,
    )
    engine, scheduler = build(config, limited=False)

    def seconds(lengths: list[int], num_tokens: int) -> list[float]:
        """From the start to the tokens of each step."""
        params = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        mailbox = Timed([[Request(str(i), [3 + i] * length, params) for i, length in enumerate(lengths)]])
        start_s = time.perf_counter()
        run_loop(scheduler, engine, mailbox, config.unread_steps)
        return [came_s - start_s for came_s in mailbox.came_s]

    seconds([CHUNK], 1)  # what happens at the first time alone
    (of_one,), (of_all,) = seconds([CHUNK], 1), seconds([CHUNK * NUM_CHUNKS], 1)
    begun = seconds([1] * ROWS, NUM_TOKENS)[num_stages + 1 :]  # the first tokens come together, while all stages fill
    step_s = (begun[-1] - begun[0]) / (len(begun) - 1)
    times = {"decode step": step_s, "one chunk": of_one, "all chunks": of_all}
    print(json.dumps(times))


if __name__ == "__main__":
    main()
