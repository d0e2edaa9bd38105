"""Which folders orders may name from which the engine reads adapters and weights: `--lora-root`, `--weights-root`.

    no root, no key    none: whoever reaches the port could have any file parsed and any hub id downloaded
    no root, a key     any folder or hub id
    a root             folders below it, with all that links in them lead to; *: any folder or hub id

A refusal is the same for a folder that doesn't exist and one that may not be named, so that nothing is told about the
file system. Used by the endpoints that load adapters (adapters.py) and weights (http/sglang/admin.py).
"""

from __future__ import annotations

from pathlib import Path

from jaxsgl.config.server import ANY_FOLDER, ServerConfig
from jaxsgl.errors import Forbidden, InvalidRequest


def adapter_folder(config: ServerConfig, given: str) -> str:
    """The folder or hub id of an adapter, if an order may load it. Raises `Forbidden`, or `InvalidRequest`."""
    return _checked(config, config.lora_root, "--lora-root", given)


def weights_folder(config: ServerConfig, given: str) -> str:
    """The folder or hub id of weights, if an order may load them. Raises as `adapter_folder`."""
    return _checked(config, config.weights_root, "--weights-root", given)


def _checked(config: ServerConfig, root: str | None, flag: str, given: str) -> str:
    if root is None and not (config.needs_key or config.admin_api_key is not None):
        raise Forbidden(
            f"no folder may be named here: start the server with {flag} FOLDER, or with a key (--api-key, "
            "--admin-api-key)"
        )
    if root in (None, ANY_FOLDER):
        return given
    assert root is not None
    try:
        home = Path(root).expanduser().resolve(strict=True)
        folder = (home / given).resolve(strict=True)
        inside = [folder, *folder.iterdir()]
        if all(path.resolve().is_relative_to(home) for path in inside):
            return str(folder)
    except (OSError, ValueError, RuntimeError):  # RuntimeError: links in a circle, before Python 3.13
        pass
    raise InvalidRequest(f"{given:.200} is no folder below {flag}, with all its files, that may be named here")
