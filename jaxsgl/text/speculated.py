"""`Speculated`: what became of the drafts of one sample, added up from its replies; sample.py counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxsgl.messages.replies import Run


@dataclass
class Speculated:
    """Steps that verified drafts of one sample; those in which it had none are not counted.

    Attributes:
      histogram: such steps by how many of their drafts are in the output.
      draft_tokens: drafts of them.
      accepted_prediction_tokens, rejected_prediction_tokens: drafts that the request's prediction gave, by whether they
        are in the output.
    """

    histogram: list[int] = field(default_factory=list)
    draft_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0

    def add(self, run: Run, num_tokens: int) -> None:
        """Counts the drafts of a step, of whose tokens the output has the first `num_tokens`."""
        kept = min(run.kept, num_tokens)
        self.histogram += [0] * (kept + 1 - len(self.histogram))
        self.histogram[kept] += 1
        self.draft_tokens += run.drafted
        if run.of_prediction:
            self.accepted_prediction_tokens += kept
            self.rejected_prediction_tokens += run.drafted - kept

    @property
    def num_steps(self) -> int:
        """Steps that verified drafts."""
        return sum(self.histogram)

    @property
    def accepted_tokens(self) -> int:
        """Drafts in the output."""
        return sum(kept * steps for kept, steps in enumerate(self.histogram))

    @property
    def accept_length(self) -> float:
        """Tokens of such a step on average: the drafts that it kept, and the one that it sampled; 0 without a step."""
        return 1 + self.accepted_tokens / self.num_steps if self.num_steps else 0.0

    @property
    def accept_rate(self) -> float:
        """Share of the drafts that is in the output."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0
