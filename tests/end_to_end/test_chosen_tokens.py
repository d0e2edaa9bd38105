"""Models whose index chooses tokens answer as transformers does, whatever the steps, and refuse what they can't do.

Two layers, of which the second one may attend to what the first one chose; texts are up to 40 times longer than a
choice. tests/end_to_end/test_families.py has chunks and prefixes of whole models.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsgl.config.engine import EngineConfig, SchedulingConfig
from jaxsgl.config.features import SpeculationConfig
from jaxsgl.engine.engine import Engine
from jaxsgl.engine.layer_state import layer_states
from jaxsgl.engine.start.model_flags import check_stages
from jaxsgl.errors import CheckpointError, ConfigError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.layer_spec import Latent
from jaxsgl.requests.request import Request, SamplingParams
from tests.checkpoint_kinds import values_of
from tests.checkpoint_kinds.sizes import OF_FAMILIES
from tests.checkpoints import make_checkpoint
from tests.end_to_end.offline import outputs, serve
from tests.end_to_end.test_families import logits_of
from tests.grids import daily

pytestmark = [pytest.mark.device, pytest.mark.timeout(600), pytest.mark.usefixtures("greedy_steps_by_day")]

TWO_LAYERS: dict[str, Any] = {"num_hidden_layers": 2}
SHARED: dict[str, Any] = {**TWO_LAYERS, "indexer_types": ["full", "shared"]}
KINDS = {"glm_moe_dsa": SHARED, "deepseek_v32": TWO_LAYERS}
LENGTHS = (2, 7, 8, 9, 33, 160, 310)  # 8 tokens are chosen
NEW_TOKENS = 8


@pytest.mark.parametrize("kind", daily(list(KINDS), every=2))
def test_tokens_equal_those_of_transformers_in_steps_of_all_kinds(kind: str, tmp_path: Path) -> None:
    """Alone, short prompts take steps without a choice; in chunks, mixed steps, and after retractions others do."""
    folder = make_checkpoint(kind, tmp_path, seed=3, **KINDS[kind])
    engine = Engine(
        EngineConfig(
            model=str(folder), page_size=4, chunked_prefill_size=64, context_length=320, max_running_requests=8,
            max_total_tokens=1200, decode_buckets=(8,), extend_buckets=(64,), decode_steps=4, compilation_cache_dir="",
        ),
        progress=False,
    )  # fmt: skip
    rng = np.random.default_rng(2)
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    prompts = [rng.integers(3, OF_FAMILIES["vocab_size"], length).tolist() for length in LENGTHS]
    requests = [Request(str(i), prompt, params) for i, prompt in enumerate(prompts)]
    answers = outputs(serve(engine, [requests]), requests)
    logits = logits_of(folder, [[*prompt, *answer] for prompt, answer in zip(prompts, answers, strict=True)])
    for prompt, answer, of_one in zip(prompts, answers, logits, strict=True):
        first = len(prompt) - 1
        assert of_one[first : first + NEW_TOKENS].argmax(axis=-1).tolist() == answer, first + 1
    alone: list[list[Any]] = [each for request in requests for each in ([request], *[[]] * 30)]
    assert outputs(serve(engine, alone), requests) == answers
    mixed: dict[str, Any] = {"config": SchedulingConfig(enable_mixed_chunk=True)}
    for changes in ({"retract_every": 5}, {"decode_steps": 1, "overlap": False}, mixed):
        assert outputs(serve(engine, [requests], **changes), requests) == answers, changes
    assert engine.recompiles == 0
    engine.close()


def config_of(kind: str, folder: Path, **changes: Any) -> ModelArch:
    config_class, model_class, values = values_of(kind)
    config = {**config_class(**values).to_dict(), "architectures": [model_class.__name__], **changes}
    (folder / "config.json").write_text(json.dumps({key: each for key, each in config.items() if each is not None}))
    return arch_from_folder(folder)


@pytest.mark.parametrize(
    ("keys", "own"),
    [
        ({"index_topk_freq": 2, "index_skip_topk_offset": 1}, [True, False, True, False]),
        (
            {"index_topk_freq": 3, "index_skip_topk_offset": 2, "num_nextn_predict_layers": 1},
            [True, True, False, False],
        ),
        ({"index_topk_pattern": "FSSF"}, [True, False, False, True]),
        ({"index_share_for_mtp_iteration": True, "moe_router_dtype": "float32"}, [True] * 4),
    ],
    ids=str,
)
def test_layers_have_an_index_by_turns_by_a_pattern_or_by_a_list(
    keys: dict[str, Any], own: list[bool], tmp_path: Path
) -> None:
    arch = config_of("glm_moe_dsa", tmp_path, num_hidden_layers=4, indexer_types=None, mlp_layer_types=None, **keys)
    latents = [layer.mixer for layer in arch.layers if isinstance(layer.mixer, Latent)]
    assert [each.own_index is not None for each in latents] == own and arch.next_layer is None
    values = values_of("glm_moe_dsa")[0](
        **{
            **values_of("glm_moe_dsa")[2],
            "num_hidden_layers": 4,
            "indexer_types": None,
            "mlp_layer_types": None,
            **keys,
        }
    )
    assert [each == "full" for each in values.indexer_types] == own


def test_a_page_has_room_for_the_keys_of_the_index(tmp_path: Path) -> None:
    arch = config_of("deepseek_v32", tmp_path)
    pages = layer_states(arch, 16, jnp.dtype("bfloat16"))
    assert pages.page_bytes == 3 * 16 * (36 + 6 + 10) * 2
    assert arch.attention_options(0).value_dim == 36


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, 'has "shared" for layer 0.*full first'),
        ("glm_moe_dsa", {"indexer_types": ["full", "none", "full"]}, 'has "none" for layer 1'),
        ("glm_moe_dsa", {"indexer_rope_interleave": False}, "indexer_rope_interleave is false"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank"),
        ("deepseek_v32", {"index_head_dim": 4}, "index_head_dim is 4"),
    ],
    ids=str,
)
def test_indices_of_other_forms_are_refused(kind: str, changes: dict[str, Any], said: str, tmp_path: Path) -> None:
    config_of(kind, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=said):
        arch_from_folder(tmp_path)


def test_flags_that_an_index_does_not_go_with_are_refused(tmp_path: Path) -> None:
    folder = make_checkpoint("glm_moe_dsa", tmp_path, **SHARED)
    with pytest.raises(ConfigError, match=r"--pp-size does not work for now.*the index of an earlier layer"):
        check_stages(EngineConfig(pp_size=2), arch_from_folder(folder))
    config = EngineConfig(model=str(folder), context_length=64, speculation=SpeculationConfig("NEXTN", 3))
    with pytest.raises(ConfigError, match=r"NEXTN drafts with .* has none that is read here: give NGRAM"):
        Engine(config, progress=False)
