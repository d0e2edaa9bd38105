"""The contender for a running OpenAI-compatible server: all requests at once, prompts as token ids."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from bench.peers.contender import UNTOLD, CannotRun, Setup
from jaxsgl.bench.requests import Job

PATIENCE_S = 3600.0
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")  # jaxsgl and SGLang; vLLM in its development mode
FLUSHED_BY = "prefix cache flushed by"  # key in the versions
NOTHING = "nothing: repeats may find their prompts cached"
MAX_ERROR = 300  # characters of an error that are shown


class Endpoint:
    """A running server.

    Args:
      url: its address, with or without /v1 at the end.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        self._parts = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"))
        self._flush = "unknown"

    def start(self, setup: Setup) -> None:
        """Asks for the name of the model."""
        try:
            status, answer = self._ask("GET", "/v1/models")
        except OSError as error:
            raise CannotRun(f"{self._parts.geturl()} doesn't answer: {error}") from None
        models = answer.get("data") if status == http.client.OK and isinstance(answer, dict) else None
        if not models:
            raise CannotRun(f"{self._parts.geturl()}/v1/models lists no model: {_told(status, answer)}")
        self._name = models[0]["id"]
        self._threads = ThreadPoolExecutor(setup.num_jobs)
        self.reset()

    def versions(self) -> dict[str, str]:
        """See `Contender`."""
        return {"url": self._parts.geturl(), "model": self._name, FLUSHED_BY: self._flush}

    def reset(self) -> None:
        """Empties the prefix cache of the server, if one of the known ways works."""
        self._flush = next(filter(self._flushes, FLUSH_PATHS), NOTHING)

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`. Such servers return no token ids, so only their token counts are checked."""
        return list(self._threads.map(self._complete, jobs))

    def close(self) -> None:
        """See `Contender`."""
        if hasattr(self, "_threads"):
            self._threads.shutdown()

    def _complete(self, job: Job) -> list[int]:
        body = {
            "model": self._name,
            "prompt": job.prompt_ids,
            "max_tokens": job.output_len,
            "temperature": 0,
            "ignore_eos": True,
        }
        status, answer = self._ask("POST", "/v1/completions", body)
        if status != http.client.OK:
            raise CannotRun(f"a request failed, with its prompt as token ids and ignore_eos: {_told(status, answer)}")
        if not isinstance(answer, dict) or not answer.get("usage"):
            raise CannotRun("its answers have no usage: tokens can't be counted")
        return [UNTOLD] * int(answer["usage"]["completion_tokens"])

    def _flushes(self, path: str) -> bool:
        """Whether the server flushes by this path. vLLM answers with status 200 even if it failed."""
        status, answer = self._ask("POST", path)
        return status == http.client.OK and not (isinstance(answer, dict) and answer.get("success") is False)

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Sends one request on a connection of its own; returns the status and the answer as JSON, or as text."""
        secure = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if secure else http.client.HTTPConnection
        connection = kind(self._parts.netloc, timeout=PATIENCE_S)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, self._parts.path + path, json.dumps(body) if body else None, headers)
            response = connection.getresponse()
            text = response.read()
            try:
                return response.status, json.loads(text)
            except ValueError:
                return response.status, text.decode(errors="replace")
        finally:
            connection.close()


def _told(status: int, answer: Any) -> str:
    return f"status {status}: {answer}"[:MAX_ERROR]
