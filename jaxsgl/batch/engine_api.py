"""What the serving loop asks of an engine. The real one is `engine.Engine`, the fake one `testing.FakeEngine`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from jaxsgl.batch.inputs import StepInputs


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities (natural, by the model's own logits) of n tokens, with K = `request.MAX_TOP_LOGPROBS`.

    Attributes:
      logprobs: `[n]` float32, of the tokens.
      top_ids: `[n, K]` int32, the most likely ones in their places, best first; fewer where the vocabulary ends.
      top_logprobs: `[n, K]` float32, theirs.
    """

    logprobs: npt.NDArray[np.float32]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class StepScores:
    """What a step yields besides tokens.

    Attributes:
      sampled: of the sampled tokens `[num_seqs]`, if the batch asked for it.
      prompt: of the `targets` of a "score" step, `[num_tokens]` in the order of its tokens.
    """

    sampled: TokenScores | None = None
    prompt: TokenScores | None = None


class StepHandle(Protocol):
    """A step that was launched."""

    def tokens(self) -> npt.NDArray[np.int32]:
        """Waits for the step; sampled token ids `[num_seqs]`, in the order of the batch.

        Of a program of several steps `[num_steps, num_seqs]`, where those behind a sequence's own steps mean nothing.
        """
        ...

    def scores(self) -> StepScores:
        """Log-probabilities, where the batch asked for some; waits like `tokens`."""
        ...


class StepEngine(Protocol):
    """Runs steps in the order in which they are submitted."""

    def submit(self, inputs: StepInputs) -> StepHandle:
        """Launches one step and returns at once; never waits for an earlier one."""
        ...

    @property
    def recompiles(self) -> int:
        """Programs compiled since the engine is ready; more than 0 is a bug."""
        ...

    def start_profile(self, folder: str) -> None:
        """Records from now on what device and host do.

        Raises OSError or ValueError if `folder` can't be made or written, RuntimeError if the profiler can't start.
        """
        ...

    def stop_profile(self) -> None:
        """Stops recording and writes the trace, which takes seconds; may be called from a thread beside `submit`.

        Raises whatever went wrong if it can't be written: it may be called again then.
        """
        ...
