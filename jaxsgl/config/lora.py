"""`LoraConfig`: flags of LoRA adapters, a part of `EngineConfig` (engine.py). Every part may import this module."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxsgl.config.flags import flag, require
from jaxsgl.errors import ConfigError

ALL_MODULES = "all"
MAX_NAME_CHARS = 256
MAX_ADAPTERS = 1024


@dataclass(frozen=True)
class LoraConfig:
    """LoRA adapters beside the model (docs/lora.md). Names and defaults of flags are SGLang's."""

    enable_lora: bool = flag(False, "let adapters be loaded while serving; --lora-paths implies it")
    lora_paths: tuple[str, ...] = flag(
        (),
        "adapters to load at the start, as name=folder other=folder; a folder alone is its own name",
        words=True,
    )
    max_loras_per_batch: int = flag(8, "adapters that run at the same time; requests for further ones wait")
    max_lora_rank: int | None = flag(
        None, "the highest rank of an adapter (default: that of the adapters at the start, or 16)"
    )
    lora_target_modules: tuple[str, ...] = flag(
        (),
        "modules that adapters may change, as q_proj,v_proj, or all (default: those of the adapters at the start, or "
        "all)",
    )
    max_loaded_loras: int | None = flag(
        None, "adapters in host memory at once; more are refused until one is unloaded (default: no limit)"
    )

    @property
    def is_on(self) -> bool:
        """Whether requests may have adapters."""
        return self.enable_lora or bool(self.lora_paths)

    @property
    def adapters(self) -> dict[str, str]:
        """The folders of the adapters at the start, by name."""
        named = (entry.split("=", 1) if "=" in entry else (entry, entry) for entry in self.lora_paths)
        return {name: str(Path(folder).expanduser()) for name, folder in named}

    def __post_init__(self) -> None:
        names = [entry.split("=", 1)[0] for entry in self.lora_paths]
        allowed = f"names of 1 to {MAX_NAME_CHARS} characters"
        for name in names:
            require(1 <= len(name) <= MAX_NAME_CHARS, "--lora-paths", repr(name), allowed)
        if len(set(names)) < len(names):
            raise ConfigError(f"--lora-paths name an adapter twice: {', '.join(names)}")
        most = self.max_loras_per_batch
        require(1 <= most <= MAX_ADAPTERS, "--max-loras-per-batch", most, f"1 to {MAX_ADAPTERS}")
        rank = self.max_lora_rank
        require(rank is None or 1 <= rank <= 1024, "--max-lora-rank", rank, "1 to 1024")
        loaded = self.max_loaded_loras
        if loaded is not None and loaded < max(len(names), 1):
            raise ConfigError(f"--max-loaded-loras is {loaded}, but --lora-paths has {len(names)}: raise it")
