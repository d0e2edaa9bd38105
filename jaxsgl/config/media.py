"""`MediaConfig`: flags of pictures and videos in requests, a part of `ServerConfig`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxsgl.config.flags import check_choices, flag, require

HASH_IDS = ("digest", "sglang")
_DOMAIN = re.compile(r"\*|(\*\.)?[a-z0-9_]([a-z0-9_.-]*[a-z0-9_])?(:[0-9]{1,5})?")


@dataclass(frozen=True)
class MediaConfig:
    """Pictures and videos in requests (docs/multimodal.md)."""

    allowed_media_domains: tuple[str, ...] = flag(
        (),
        "hosts from which pictures and videos are fetched, as images.example.org,*.example.com,cdn.example.net:8443; "
        "only at global addresses (default: none, requests bring their pictures as data: URLs)",
    )
    media_max_bytes: int = flag(
        64 << 20, "bytes of all pictures and videos of a request at most, as files; see --max-request-bytes, too"
    )
    media_max_pixels: int = flag(1 << 25, "pixels of a picture at most, by its header, before it is decoded")
    media_max_decode_bytes: int = flag(
        192 << 20,
        "memory for decoding pictures, in bytes, of each front-end process; a picture that takes more by its header is "
        "refused, and one that finds too little left waits (JPEG and PNG take 4 to 6 bytes a pixel, WebP 16)",
    )
    media_max_cpu_s: float = flag(
        20.0, "seconds of processor time that decoding all pictures and videos of a request may take"
    )
    media_timeout_s: float = flag(10.0, "seconds that fetching a picture or video may take, redirects included")
    mm_hash_ids: str = flag(
        "digest",
        "what stands for pictures in the prefix cache and in KV events; digest: numbers drawn from their SHA-256; "
        "sglang: one number of 30 bits for each, by SGLang's formula, for routers that know it",
        choices=HASH_IDS,
    )

    def __post_init__(self) -> None:
        check_choices(self)
        for domain in self.allowed_media_domains:
            fits = _DOMAIN.fullmatch(domain) is not None
            require(fits, "--allowed-media-domains", domain, "names as example.org, *.example.org or example.org:8443")
        require(self.media_max_bytes >= 1024, "--media-max-bytes", self.media_max_bytes, "1024 and more")
        require(1024 <= self.media_max_pixels <= 1 << 28, "--media-max-pixels", self.media_max_pixels, "1024 to 2**28")
        least = self.media_max_decode_bytes >= 1 << 20
        require(least, "--media-max-decode-bytes", self.media_max_decode_bytes, "2**20 and more")
        cpu_s = self.media_max_cpu_s
        require(0 < cpu_s <= 3600, "--media-max-cpu-s", cpu_s, "above 0, up to 3600")
        require(0 < self.media_timeout_s <= 600, "--media-timeout-s", self.media_timeout_s, "above 0, up to 600")
