"""The shape of a tower that hears, read from the object `audio_config` of a model's config.json.

Such a tower is Whisper's encoder (arXiv 2212.04356), whose layers are those of towers that see. Never knows parameters
or sounds. `models/arch_file.py` reads it.
"""

from __future__ import annotations

from jaxsgl.errors import CheckpointError
from jaxsgl.models.config_file import ConfigFile
from jaxsgl.models.towers.arch import LayerShape, MergerShape, Norms, PatchShape, Positioning, TowerArch, TowerTokens
from jaxsgl.models.towers.family import HearingFamily
from jaxsgl.requests.media import SoundShape

NORM_EPS = 1e-5  # for which config.json has no key
AVERAGED = 2  # positions that become one token of "averaged"


def read_hearing(whole: ConfigFile, family: HearingFamily, hidden_size: int) -> TowerArch | None:
    """The tower that goes with a decoder of `hidden_size`; None: config.json describes none.

    Raises `CheckpointError` for what isn't supported.
    """
    config = whole.section("audio_config")
    if config is None:
        return None
    config.defaults, config.keys = family.defaults, family.keys
    for key, needed in family.required_beside.items():
        if whole.get(key, needed) != needed:
            raise CheckpointError(f"{whole.path}: {key} is {whole.get(key)}, but must be {needed}")
    width, heads, ffn_size = (
        config.count(key, usual)
        for key, usual in (("d_model", 1280), ("encoder_attention_heads", 20), ("encoder_ffn_dim", 5120))
    )
    merge = AVERAGED if family.merger == "averaged" else ffn_size // width
    sound = SoundShape(
        config.count("max_source_positions", 1500), config.count("num_mel_bins", 128), merge, family.hears_all
    )
    if family.merger == "square" and ffn_size % width:
        raise CheckpointError(
            f"{config.path}: audio_config.{config.told_as('encoder_ffn_dim')} is {ffn_size}, but must be a multiple of "
            f"{config.told_as('d_model')}, {width}"
        )
    if sound.num_patches % merge:
        raise CheckpointError(
            f"{config.path}: audio_config.max_source_positions is {sound.num_patches}, but must be a multiple of "
            f"{merge}, which become one token"
        )
    if width % heads:
        raise CheckpointError(f"{config.path}: {heads} heads of audio_config can't share {width} numbers evenly")
    activation = config.get("activation_function", "gelu")
    if activation != "gelu":
        raise CheckpointError(f"{config.path}: audio_config.activation_function is {activation}, but must be gelu")
    is_averaged = family.merger == "averaged"
    return TowerArch(
        hidden_size=width,
        out_size=hidden_size,
        patches=PatchShape(size=1, frames=1, channels=1),
        positioning=Positioning(turns=False),
        norms=Norms(eps=NORM_EPS, last=not is_averaged),
        layers=LayerShape(config.count("encoder_layers", 32), heads, width // heads, ffn_size, activation="gelu"),
        merger=MergerShape(
            family.merger,
            merge,
            num_axes=1,
            norm="deviation" if is_averaged else None,
            eps=NORM_EPS,
            bias=is_averaged,
        ),
        tokens=TowerTokens(
            image_id=whole.count(family.audio_token_key, family.audio_token_id),
            most=sound.num_tokens(sound.num_patches),
        ),
        sound=sound,
    )
