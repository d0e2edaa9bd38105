"""--kernels: a backend for each operation, whatever the automatic choice and --attention-backend say."""

from __future__ import annotations

import pytest

from jaxsgl.config.kernels import BACKENDS_OF_NAME, OP_OF_NAME
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.kernels.choice import asked_kernels
from jaxsgl.engine.weight_store import read_arch
from jaxsgl.errors import ConfigError
from jaxsgl.weights import resolve_model_folder
from pallas_kernels import KernelChoice
from pallas_kernels.choice import OPS
from pallas_kernels.dispatch import BACKEND_OF_NAME
from tests.engine.conftest import ConfigMaker


def test_the_flag_knows_the_kernels_operations_and_backends() -> None:
    assert sorted(OP_OF_NAME.values()) == sorted(OPS)
    fields = {"paged_decode_attention": "decode", "paged_extend_attention": "extend", "store_kv": "store"}
    others = {"delta_decode": "delta_scan"}  # of the same operation
    for name, op in OP_OF_NAME.items():
        kinds = {fields.get(op, op), others.get(op, fields.get(op, op))}
        has = {each for each, backend in BACKEND_OF_NAME.items() if any(getattr(backend, kind) for kind in kinds)}
        assert set(BACKENDS_OF_NAME[name]) == has | {"auto", "xla"}, name


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("decode",), "holds 'decode', but must hold pairs operation=backend"),
        (("attention=xla",), "names the operation 'attention', but must name one of decode, extend, store"),
        (("norm=native",), "norm=native: norm has no backend 'native'; give one of auto, xla, triton"),
        (("norm=xla", "norm=triton"), "names norm twice: give it one backend"),
    ],
)
def test_words_that_name_nothing_are_refused(tiny_config: ConfigMaker, words: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--kernels {message}"):
        tiny_config(kernels=words)


def test_kernels_override_the_attention_backend(tiny_config: ConfigMaker) -> None:
    config = tiny_config(attention_backend="xla", kernels=("decode=reference", "norm=triton"))
    chosen = asked_kernels(config, read_arch(config, resolve_model_folder(config.model, None)))
    of_others = dict.fromkeys(("attend_to_chosen", "attend_to_groups", "score_tokens"), "xla")
    assert chosen == KernelChoice("xla", "xla", "reference", "xla", "triton", "auto", **of_others)


def test_experts_of_a_model_without_any_are_refused(tiny_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match="--kernels names experts, but Qwen3ForCausalLM has none: leave them out"):
        Engine(tiny_config(kernels=("experts=xla",)), progress=False)


@pytest.mark.parametrize("name", ["chosen", "grouped", "index"])
def test_what_an_index_chooses_in_a_model_without_one_is_refused(name: str, tiny_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match=f"--kernels names {name}, but Qwen3ForCausalLM has no "):
        Engine(tiny_config(kernels=(f"{name}=xla",)), progress=False)


def test_products_of_weights_in_groups_of_a_model_without_any_are_refused(tiny_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match="names quantized, but Qwen3ForCausalLM has no weights whose scales are"):
        Engine(tiny_config(kernels=("quantized=xla",)), progress=False)


def test_products_in_float8_of_a_model_without_such_weights_are_refused(tiny_config: ConfigMaker) -> None:
    with pytest.raises(ConfigError, match="names float8, but Qwen3ForCausalLM has no weights in float8"):
        Engine(tiny_config(kernels=("float8=xla",)), progress=False)


@pytest.mark.parametrize("word", ["extend=mosaic_tpu", "decode=triton", "rotate=triton", "norm=triton"])
def test_an_operations_kernel_that_cannot_run_here_is_refused(tiny_config: ConfigMaker, word: str) -> None:
    op, backend = word.split("=")
    message = f"--kernels {word}: {OP_OF_NAME[op]}: backend '{backend}' is impossible here: it needs a"
    with pytest.raises(ConfigError, match=message):
        Engine(tiny_config(kernels=(word,)), progress=False)


def test_activations_of_a_model_in_float8_stay_as_they_are_with_weights_alone_quantized(
    tiny_config: ConfigMaker,
) -> None:
    for weight_only, backend in ((False, "auto"), (True, "xla")):
        config = tiny_config(quantization="fp8", weight_only=weight_only)
        chosen = asked_kernels(config, read_arch(config, resolve_model_folder(config.model, None)))
        assert chosen.float8_product == backend
