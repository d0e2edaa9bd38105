"""What the scheduler counts since its start, for `messages.Load`. A few additions per step."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.batch.inputs import StepInputs
from jaxsgl.messages import Load
from jaxsgl.scheduler.admit import NoRoom
from jaxsgl.scheduler.req import Req


@dataclass(slots=True)
class Totals:
    """The attributes are those of `Load` that end in `_total`, which says what each means."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0
    decode_rows: int = 0
    decode_rows_padded: int = 0
    extend_tokens: int = 0
    extend_tokens_padded: int = 0
    retractions: int = 0
    short_of_tokens: int = 0
    short_of_rows: int = 0
    short_of_chunk: int = 0

    def admitted(self, req: Req) -> None:
        """`req` has just been admitted."""
        self.prompt_tokens += req.prompt_len
        self.cached_prompt_tokens += req.cached_tokens

    def launched(self, inputs: StepInputs, no_room: NoRoom | None) -> None:
        """`inputs` goes to the device; `no_room` is why somebody has to wait on, if anybody does."""
        self.steps += 1
        self.short_of_tokens += no_room is NoRoom.TOKENS
        self.short_of_rows += no_room is NoRoom.ROWS
        self.short_of_chunk += no_room is NoRoom.CHUNK
        if inputs.bucket.kind == "decode":
            self.decode_rows += inputs.num_tokens
            self.decode_rows_padded += inputs.bucket.padded_tokens
        else:
            self.extend_tokens += inputs.num_tokens
            self.extend_tokens_padded += inputs.bucket.num_tokens

    def load(self, recompiles: int, leaks: int, paused: bool, **gauges: int) -> Load:
        """All that is counted, beside the `gauges` of `Load`, which the scheduler reads off."""
        return Load(
            prompt_tokens_total=self.prompt_tokens,
            cached_prompt_tokens_total=self.cached_prompt_tokens,
            output_tokens_total=self.output_tokens,
            steps_total=self.steps,
            decode_rows_total=self.decode_rows,
            decode_rows_padded_total=self.decode_rows_padded,
            extend_tokens_total=self.extend_tokens,
            extend_tokens_padded_total=self.extend_tokens_padded,
            retractions_total=self.retractions,
            short_of_tokens_total=self.short_of_tokens,
            short_of_rows_total=self.short_of_rows,
            short_of_chunk_total=self.short_of_chunk,
            recompiles_total=recompiles,
            leaks_total=leaks,
            paused=paused,
            **gauges,
        )
