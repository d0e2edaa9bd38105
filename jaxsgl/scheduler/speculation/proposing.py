"""`Proposing`: the `Drafter` of one request, which asks its sources in turn, each at its pace.

The source whose drafts were kept most often is asked first. So where weights draft and the text repeats, long matches
of prompt lookup come before what the weights say, and nothing is drafted on the device while these are all kept; text
that doesn't repeat is left to the weights.

`Drafters` makes them, as flags and the request say. A request that refuses speculation, or can't have it, has
`NO_DRAFTS`. wiring.py hands `Drafters` to the scheduler.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from jaxsgl.config.features import SpeculationConfig
from jaxsgl.requests.media import MediaLimits
from jaxsgl.requests.request import Request
from jaxsgl.scheduler.speculation.drafter import NO_DRAFTS, DeviceDrafts, Drafter
from jaxsgl.scheduler.speculation.occurrences import SharedBulk
from jaxsgl.scheduler.speculation.pace import Pace
from jaxsgl.scheduler.speculation.sources import (
    FromDevice,
    PastAnswers,
    PredictedText,
    Prediction,
    PromptLookup,
    Source,
    SuffixLookup,
)

LONG_MATCH = (3, 8)  # tokens of a match, at least and at most, that may be right where the drafts of weights aren't


class Proposing(Drafter):
    """Proposes what the likeliest of its sources knows that knows anything; each has a pace of its own.

    Args:
      sources: of those that were right equally often, the first goes first.
      most: drafts of a step.
      prediction: which of `sources` is what the client expects; None: it expects nothing.
      never: tokens that stand for images, and that no step may embed as drafts.
      device: which of `sources` gets what the device drafts; None: none does.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        most: int,
        prediction: Source | None = None,
        never: frozenset[int] = frozenset(),
        device: FromDevice | None = None,
    ) -> None:
        self._sources = [(source, Pace()) for source in sources]
        self._most = most
        self._prediction = prediction
        self._never = never
        self._device = device or FromDevice()
        self._copies = False  # the last drafts were not the device's, and all were kept
        self._asked = 0  # which source the last proposal was of: a proposal is judged before there is another one

    def extend(self, tokens: Sequence[int]) -> None:
        """See `Drafter`."""
        for source, pace in self._sources:
            source.extend(tokens)
            pace.extend(len(tokens))

    def propose(self, most: int) -> tuple[int, ...]:
        """See `Drafter`."""
        for number in sorted(range(len(self._sources)), key=lambda number: -self._sources[number][1].probability):
            source, pace = self._sources[number]
            length = min(most, self._most, pace.length)
            drafts = source.propose(length) if length > 0 else ()
            if self._never:
                drafts = tuple(itertools.takewhile(lambda token_id: token_id not in self._never, drafts))
            if drafts:
                self._asked = number
                return drafts
        return ()

    def judge(self, drafted: int, kept: int) -> None:
        """See `Drafter`."""
        source, pace = self._sources[self._asked]
        pace.judge(drafted, kept)
        self._copies = kept == drafted and source is not self._device

    @property
    def asks(self) -> bool:
        """See `Drafter`: while the pace of what the device drafts isn't to pause, and no other source does well."""
        return not self._copies and any(source is self._device and pace.length > 0 for source, pace in self._sources)

    def take(self, drafts: DeviceDrafts) -> None:
        """See `Drafter`."""
        self._device.take(drafts)

    def end(self) -> None:
        """See `Drafter`."""
        for source, _ in self._sources:
            source.end()

    @property
    def rests(self) -> bool:
        """See `Drafter`."""
        return not any(pace.length for _, pace in self._sources)

    @property
    def probability(self) -> float:
        """See `Drafter`."""
        return self._sources[self._asked][1].probability

    @property
    def of_prediction(self) -> bool:
        """See `Drafter`."""
        return self._sources[self._asked][0] is self._prediction


class _Shared:
    """What the drafters of a request's samples have in common: what is sorted of its prompt, and its prediction."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.prompt = SharedBulk()
        self.prediction = PredictedText(request.prediction_ids) if request.prediction_ids else None


class Drafters:
    """Makes the drafter of each sample of each request.

    Args:
      config: flags.
      media: what images look like in prompts; None: the model takes none.
    """

    def __init__(self, config: SpeculationConfig, media: MediaLimits | None = None) -> None:
        self._config = config
        self._answers = PastAnswers(config.speculative_suffix_cache_mib << 20)
        self._placeholders = frozenset(() if media is None else (media.image_token_id, media.video_token_id))
        self._newest: _Shared | None = None  # of the request asked for last: its samples come one after the other

    def __call__(self, request: Request) -> Drafter:
        """The drafter of one sample of `request`, which knows no tokens yet. One after the other they share."""
        config = self._config
        if not config.is_on or not request.speculative or request.pooling is not None:
            return NO_DRAFTS
        sources: list[Source] = []
        prediction = None
        shared = self._newest
        if shared is None or shared.request is not request:
            shared = _Shared(request)
        self._newest = shared if request.sampling.n > 1 else None
        if shared.prediction is not None:
            prediction = Prediction(shared.prediction, len(request.prompt_ids))
            sources.append(prediction)
        device = FromDevice() if config.is_from_weights else None
        sources += (
            [self._lookup(request, shared.prompt)]
            if device is None
            else [PromptLookup(*LONG_MATCH, shared.prompt), device]
        )
        return Proposing(sources, config.num_draft_tokens, prediction, self._placeholders, device)

    def _lookup(self, request: Request, prompt: SharedBulk) -> Source:
        config = self._config
        if config.speculative_algorithm == "NGRAM":
            return PromptLookup(*config.match_window, prompt)
        owner = request.cache_salt, request.adapter
        return SuffixLookup(config.num_draft_tokens, len(request.prompt_ids), self._answers, owner, prompt)
