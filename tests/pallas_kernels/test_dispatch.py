"""One point chooses the backend; a wrong request is an error that names what would be right."""

import dataclasses
import inspect
import logging
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from pallas_kernels import AttentionOptions, PagedKv, paged_decode_attention, paged_extend_attention, store_kv, tuning
from pallas_kernels.backend import refuse_nothing
from pallas_kernels.dispatch import choose_backend
from pallas_kernels.specs import GRID_SPECS, SMALL_SPECS, ArgSpec, store_rotated
from pallas_kernels.target import target_device

PLAIN = SMALL_SPECS[0]
EVERYTHING = {"reference": refuse_nothing, "xla": refuse_nothing, "triton": refuse_nothing}


def on_a_device(platform: str, kind: str):
    """Traces inside see this device as their target although it isn't there."""
    fields: dict[str, Any] = {"device_kind": kind, "num_cores": 132, "platform": platform}
    known = inspect.signature(AbstractDevice).parameters  # `platform` isn't there in every version
    device = AbstractDevice(**{name: value for name, value in fields.items() if name in known})
    return use_abstract_mesh(AbstractMesh((), (), abstract_device=device))


def on_an_h100():
    return on_a_device("cuda", "NVIDIA H100 80GB HBM3")


def test_auto_follows_the_platform_and_its_table() -> None:
    def chosen(implemented=EVERYTHING) -> str:
        return choose_backend("paged_decode_attention", "auto", implemented).name

    assert chosen() == "xla"
    with on_an_h100():
        assert tuning.preferred_backends("paged_decode_attention") == ["mosaic_gpu", "triton"]
        assert chosen() == "triton"
        assert chosen({**EVERYTHING, "mosaic_gpu": refuse_nothing}) == "mosaic_gpu"
    with on_a_device("cuda", "NVIDIA A100-SXM4-80GB"):
        assert chosen({**EVERYTHING, "mosaic_gpu": refuse_nothing}) == "triton"
    with on_a_device("tpu", "TPU v5 lite"):
        assert chosen() == "xla"
        assert chosen({**EVERYTHING, "mosaic_tpu": refuse_nothing}) == "mosaic_tpu"


@pytest.mark.parametrize("page_size", [16, 64])
@pytest.mark.parametrize("op", [paged_decode_attention, paged_extend_attention])
def test_attention_on_hopper_runs_on_the_hopper_kernel_where_it_can(op: Any, page_size: int) -> None:
    spec = ArgSpec("serving", 4, 64, 4, page_size, 2, 4, 128, dtype=jnp.bfloat16)
    exact = dataclasses.replace(spec, dtype=jnp.float32)  # `wgmma` has no exact float32

    def kernels(kind: str, of: ArgSpec) -> str:
        with on_a_device("cuda", kind):
            args = of.decode_args() if op is paged_decode_attention else of.extend_args()
            traced = jax.jit(lambda *a: op(*a)).trace(*args)
            return traced.lower(lowering_platforms=("cuda",)).as_text()

    assert "mosaic_gpu" in kernels("NVIDIA H200", spec)
    for elsewhere in (kernels("NVIDIA H200", exact), kernels("NVIDIA A100-SXM4-80GB", spec)):
        assert "triton" in elsewhere
        assert "mosaic_gpu" not in elsewhere


def test_an_accelerator_left_with_xla_warns_once_why_and_what_it_costs(caplog: pytest.LogCaptureFixture) -> None:
    refusing: dict[str, Any] = {**EVERYTHING, "triton": lambda: "head size is 80 in this test"}
    with on_an_h100(), caplog.at_level(logging.INFO, logger="pallas_kernels"):
        for _ in range(3):
            assert choose_backend("paged_decode_attention", "auto", refusing).name == "xla"
    expected = (
        "paged_decode_attention: not using triton: head size is 80 in this test. "
        "XLA computes it: a loop in each layer that the host steps, many times as slow"
    )
    assert [(r.levelname, r.message) for r in caplog.records] == [("WARNING", expected)]


def test_a_fall_to_another_kernel_or_on_a_cpu_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    def chosen(refused: str) -> str:
        refusals: dict[str, Any] = dict.fromkeys(("xla", "native", "mosaic_gpu", "triton"), refuse_nothing)
        return choose_backend("paged_decode_attention", "auto", refusals | {refused: lambda: "of this test"}).name

    with caplog.at_level(logging.INFO, logger="pallas_kernels"):
        with on_an_h100():
            assert chosen("mosaic_gpu") == "triton"
        assert chosen("native") == "xla"
    assert [r.levelname for r in caplog.records] == ["INFO", "INFO"]
    assert "not using mosaic_gpu: of this test" in caplog.records[0].message


@dataclasses.dataclass(frozen=True)
class Gpu:
    """What JAX says about a GPU that is there."""

    device_kind: str
    compute_capability: str
    platform: str = "gpu"
    core_count: int = 40


@pytest.mark.parametrize(
    ("gpu", "expected"), [(Gpu("Tesla T4", "7.5"), "xla"), (Gpu("NVIDIA A10", "8.6"), "triton"),
                          (Gpu("NVIDIA B200", "10.0"), "triton"), (Gpu("AMD Instinct MI300X", "gfx942"), "triton")]
)  # fmt: skip
def test_gpus_older_than_ampere_get_xla(gpu: Gpu, expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    assert choose_backend("store_kv", "auto", EVERYTHING).name == expected


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("NVIDIA A100-SXM4-80GB", False), ("NVIDIA GeForce RTX 4090", True), ("NVIDIA H200", True), ("NVIDIA B200", True)],
)
def test_gpus_that_are_not_there_have_the_instructions_of_their_generation(kind: str, expected: bool) -> None:
    with on_a_device("cuda", kind):
        assert target_device().converts_float8 is expected


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        ("cuda", "unknown backend 'cuda'; choose one of auto, reference, xla, native, triton"),
        ("mosaic_tpu", "needs a tpu, this is a cpu"),
        ("triton", "needs a gpu, this is a cpu"),
    ],
)
def test_an_impossible_backend_is_an_error_with_the_options(backend: str, message: str) -> None:
    args = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), PLAIN.decode_args())
    with pytest.raises(ValueError, match="paged_decode_attention: ") as error:
        paged_decode_attention(*args, backend=backend)
    assert message in str(error.value)


def test_a_backend_that_the_op_lacks_is_an_error_with_the_options() -> None:
    with pytest.raises(ValueError, match="'mosaic_tpu' is not implemented for this op; choose one of auto, reference"):
        choose_backend("paged_decode_attention", "mosaic_tpu", EVERYTHING)


def test_shapes_that_a_named_backend_refuses_are_an_error() -> None:
    spec = ArgSpec("head_dim_72", 2, 4, 2, 16, 1, 1, 72)
    for op, args, _ in spec.calls():
        with pytest.raises(ValueError, match=r"backend 'triton' is impossible here: head size is 72"):
            jax.eval_shape(lambda *a, op=op: op(*a, backend="triton", interpret=True), *args)


@pytest.mark.parametrize("spec", GRID_SPECS[::8], ids=lambda spec: spec.name)  # all of them in test_lowering.py
def test_every_op_lowers_for_cuda_through_triton(spec: ArgSpec) -> None:
    for op, args, options in spec.calls():
        with on_an_h100():
            traced = jax.jit(lambda *a, op=op, options=options: op(*a, backend="triton", **options)).trace(*args)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert "triton_kernel_call" in text or "__gpu$xla.gpu.triton" in text
        assert ("rotate_and_store" if op is store_rotated else op.__name__) in text


BAD_CALLS = {
    "different cache shapes": (store_kv, PLAIN.store_args, "kv.v", (9, 2, 16, 16), jnp.float32, "must have one shape"),
    "page size 512": (store_kv, PLAIN.store_args, "kv", (9, 2, 512, 16), jnp.float32, "page_size is 512"),
    "int8 cache": (store_kv, PLAIN.store_args, "kv", (21, 2, 16, 16), jnp.int8, "kv.k has dtype int8"),
    "too many slots": (store_kv, PLAIN.store_args, 3, (25,), jnp.int32, r"slots \(25,\)"),
    "int16 lengths": (
        paged_decode_attention,
        PLAIN.decode_args,
        "kv.lengths",
        (4,),
        jnp.int16,
        "lengths has dtype int16",
    ),
    "flat table": (paged_decode_attention, PLAIN.decode_args, "kv.page_table", (20,), jnp.int32, r"page_table \(20,\)"),
    "odd heads": (paged_decode_attention, PLAIN.decode_args, 0, (4, 5, 16), jnp.float32, "multiple of the 2 kv heads"),
    "two tokens": (
        paged_decode_attention,
        PLAIN.decode_args,
        0,
        (8, 4, 16),
        jnp.float32,
        "one token for each of the 4",
    ),
    "short offsets": (paged_extend_attention, PLAIN.extend_args, 1, (4,), jnp.int32, r"query_offsets is \(4,\)"),
}


@pytest.mark.parametrize("call", BAD_CALLS.values(), ids=BAD_CALLS)
def test_arguments_that_do_not_fit_are_errors(call) -> None:
    op, make_args, place, shape, dtype, message = call
    args = list(make_args())
    wrong: Any = jax.ShapeDtypeStruct(shape, dtype)
    if isinstance(place, int):
        args[place] = wrong
    else:
        names = {"kv": ("k", "v")}.get(place, (place.removeprefix("kv."),))
        changes: dict[str, Any] = dict.fromkeys(names, wrong)
        args = [dataclasses.replace(a, **changes) if isinstance(a, PagedKv) else a for a in args]
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(op, *args)


OPTIONS_OUT_OF_RANGE = [
    {"sliding_window": 0},
    {"logit_soft_cap": -1.0},
    {"logit_soft_cap": 0.0},
    {"sm_scale": 0.0},
    {"sm_scale": -1.0},
]


@pytest.mark.parametrize("option", OPTIONS_OUT_OF_RANGE)
def test_options_out_of_range_are_errors(option: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(option))):
        AttentionOptions(**option)


def test_the_package_is_importable_alone() -> None:
    code = (
        "import sys, pallas_kernels; assert not [m for m in sys.modules if m.partition('.')[0] in ('jaxsgl', 'flax')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_compilers_of_accelerators_are_imported_when_a_kernel_is_asked_for() -> None:
    program = "import sys, pallas_kernels; sys.exit('jax.experimental.pallas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
