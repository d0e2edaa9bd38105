"""What pictures and videos are once they are loaded: parts, each with its patches. Knows neither files nor prompts."""

from __future__ import annotations

from dataclasses import dataclass

from jaxsgl.requests.media import Grid


@dataclass(frozen=True)
class Part:
    """What one run of placeholder tokens stands for: a picture, or a temporal patch of a video.

    Attributes:
      digest, grid, pixels: as in `MediaItem`.
      time_s: of a temporal patch, the mean of its first and last frame's; None: a picture.
    """

    digest: bytes
    grid: Grid
    pixels: bytes
    time_s: float | None = None

    @property
    def num_patches(self) -> int:
        """Patches of the grid."""
        t, h, w = self.grid
        return t * h * w


@dataclass(frozen=True)
class Visual:
    """A picture, which has one part, or a video."""

    parts: tuple[Part, ...]
    is_video: bool
