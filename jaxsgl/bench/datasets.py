"""Datasets under SGLang's names and flags, as traces of `jaxsgl.bench.traces`. Called by load.py."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from jaxsgl.bench.requests import Ask
from jaxsgl.bench.traces import FORMATS, TraceConfig, made_up, replayed
from jaxsgl.config.flags import flag
from jaxsgl.errors import ConfigError

NAMES = ("random", "random-ids", "generated-shared-prefix", "multi-turn", *FORMATS)


@dataclass(frozen=True)
class DatasetConfig:
    """Which requests are sent, and when."""

    dataset_name: str = flag(
        "random",
        "random, random-ids (the same): prompts of random ids; generated-shared-prefix: groups with a system prompt of "
        "their own; multi-turn: conversations, each turn sent when the one before is answered; mooncake, bailian: "
        "--dataset-path",
        choices=NAMES,
    )
    dataset_path: str | None = flag(
        None, "recorded trace: JSON lines with timestamp, input_length, output_length, hash_ids"
    )
    slowdown_factor: float = flag(1.0, "factor on the trace's timestamps", alias="--mooncake-slowdown-factor")
    num_prompts: int = flag(1000, "requests in all, every turn counted; of a trace at most")
    request_rate: float = flag(
        float("inf"), "Poisson arrivals a second (of conversations in multi-turn); inf: all at once; not for traces"
    )
    seed: int = flag(1, "of lengths, arrivals and token ids")
    random_input_len: int = flag(1024, "random: tokens of a prompt at most")
    random_output_len: int = flag(1024, "random: tokens of an output at most")
    random_range_ratio: float = flag(0.0, "random, multi-turn: lengths are uniform from this share of the most on")
    gsp_num_groups: int = flag(64, "generated-shared-prefix: groups")
    gsp_prompts_per_group: int = flag(16, "generated-shared-prefix: requests of each; --num-prompts doesn't count")
    gsp_system_prompt_len: int = flag(2048, "generated-shared-prefix: tokens that a group has in common")
    gsp_question_len: int = flag(128, "generated-shared-prefix: tokens that follow them")
    gsp_output_len: int = flag(256, "generated-shared-prefix: tokens of an output")
    turns: int = flag(8, "multi-turn: turns of a conversation at most, at least one")
    turn_input_len: int = flag(256, "multi-turn: tokens that a turn adds at most")
    turn_output_len: int = flag(256, "multi-turn: tokens of an output at most")
    turn_system_len: int = flag(512, "multi-turn: tokens that all conversations begin with")
    think_s: float = flag(0.0, "multi-turn: mean seconds from an answer to the next turn")

    def __post_init__(self) -> None:
        for spec in fields(self):
            value = getattr(self, spec.name)
            name = "--" + spec.name.replace("_", "-")
            if isinstance(value, int) and value < 1 and spec.name != "seed":
                raise ConfigError(f"{name} is {value}, but must be 1 and more")
            if spec.name in ("request_rate", "slowdown_factor") and not value > 0:
                raise ConfigError(f"{name} is {value}, but must be more than 0")
        if not 0 <= self.random_range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio is {self.random_range_ratio}, but must be 0 to 1")
        if self.think_s < 0 or self.seed < 0:
            raise ConfigError(f"--think-s is {self.think_s} and --seed {self.seed}, but both must be 0 and more")

    @property
    def replays(self) -> bool:
        """Whether requests arrive as in a recorded file."""
        return self.dataset_name in FORMATS

    def asks(self) -> list[Ask]:
        """The requests in order of arrival.

        Raises `ConfigError` or `ValueError` if a value is out of range or no trace.
        """
        if not self.replays:
            return list(made_up(self._trace(), self.seed))
        if self.dataset_path is None:
            raise ConfigError(f"--dataset-name {self.dataset_name} replays a file: name it with --dataset-path")
        return replayed(Path(self.dataset_path), self.dataset_name, self.num_prompts, self.slowdown_factor)

    def _trace(self) -> TraceConfig:
        rate, ratio = self.request_rate, self.random_range_ratio
        match self.dataset_name:
            case "generated-shared-prefix":
                return TraceConfig(
                    trace="shared-prefix", request_rate=rate, range_ratio=1.0, groups=self.gsp_num_groups,
                    num_prompts=self.gsp_num_groups * self.gsp_prompts_per_group, input_len=self.gsp_question_len,
                    output_len=self.gsp_output_len, system_len=self.gsp_system_prompt_len,
                )  # fmt: skip
            case "multi-turn":
                return TraceConfig(
                    trace="chat", request_rate=rate, range_ratio=ratio, num_prompts=self.num_prompts, turns=self.turns,
                    input_len=self.turn_input_len, output_len=self.turn_output_len, system_len=self.turn_system_len,
                    think_s=self.think_s,
                )  # fmt: skip
            case _:
                return TraceConfig(
                    trace="random", request_rate=rate, range_ratio=ratio, num_prompts=self.num_prompts,
                    input_len=self.random_input_len, output_len=self.random_output_len,
                )  # fmt: skip
