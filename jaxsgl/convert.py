"""Convert a checkpoint of safetensors files into one whose parameters lie as jaxsgl holds them, in Orbax's format.

    jaxsgl convert --model path/or/hub-id --output converted
    jaxsgl serve converted

The new folder also has the configuration, the tokenizer and the chat template, so it serves by itself, on any number of
devices. Needs no accelerator. The host needs memory for the model, and a while for a second copy of it.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from jaxsgl.config.engine import BUNDLED_MODEL, DTYPES
from jaxsgl.errors import ConfigError, JaxsglError
from jaxsgl.models import ModelArch, arch_from_folder
from jaxsgl.models.arch import serve_as
from jaxsgl.weights import (
    as_stored,
    is_converted,
    load_params,
    make_output,
    resolve_model_folder,
    save_converted,
)
from jaxsgl.weights.sharding import check_divisible, make_mesh

MAX_SHARDS = 8  # of a parameter; a mesh of more devices reads parts of them


def convert(model: str, output: Path, dtype: str, revision: str | None = None) -> int:
    """Converts `model`, a folder or a hub id, and returns the number of bytes of the parameters.

    Raises `JaxsglError` for a model that can't be loaded, or converted already, and for an output that has files or
    can't be made.
    """
    folder = resolve_model_folder(model, revision)
    if is_converted(folder):
        raise ConfigError(f"{folder} is converted already: --model takes it as it is")
    # A model made for embeddings has the parameters of one that is served without flags.
    arch = as_stored(arch_from_folder(folder), folder)
    arch = serve_as(arch, is_embedding=False, enable_embeddings=False, matryoshka=False)
    make_output(output)  # before minutes of reading
    mesh = make_mesh(jax.devices()[: num_shards(arch)])
    params = load_params(folder, arch, jax.numpy.dtype(arch.dtype if dtype == "auto" else dtype), mesh)
    save_converted(folder, output, params)
    return sum(array.nbytes for array in jax.tree.leaves(params))


def num_shards(arch: ModelArch) -> int:
    """How many parts a parameter is stored in: up to `MAX_SHARDS`, a power of two that divides the model."""
    number = MAX_SHARDS
    while number > 1:
        try:
            check_divisible(arch, make_mesh(jax.devices()[:number]))
            break
        except ConfigError:
            number //= 2
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    """Converts as the command line says."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("jaxsgl convert", description=__doc__, formatter_class=raw)
    parser.add_argument("--model", default=BUNDLED_MODEL, help="local folder or hub id (default: the bundled model)")
    parser.add_argument("--revision", help="branch, tag or commit of the hub id")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="a new or empty folder")
    parser.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights; auto: the checkpoint's")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells a lot
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", MAX_SHARDS)
    try:
        num_bytes = convert(options.model, options.output, options.dtype, options.revision)
    except JaxsglError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"stopped: remove {options.output} before you convert again", file=sys.stderr)
        return 130
    print(f"{options.output}: {num_bytes / 1e9:.2f} GB of parameters")
    return 0


if __name__ == "__main__":
    sys.exit(main())
