"""Any OpenAI-compatible server that runs already, by its URL: all requests at once, prompts as token ids."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from workloads.jobs import Job

from peers.contender import UNTOLD, CannotRun, Setup

PATIENCE_S = 3600.0
FLUSH_PATHS = ("/flush_cache", "/reset_prefix_cache")  # jaxsgl and SGLang; vLLM in its development mode


class Endpoint:
    """A server.

    Args:
      url: with or without the /v1.
    """

    def __init__(self, url: str) -> None:
        parts = urllib.parse.urlsplit(url if "://" in url else f"http://{url}")
        self._parts = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1"))
        self._flush = "unknown"

    def start(self, setup: Setup) -> None:
        """Asks for the model's name."""
        try:
            status, answer = self._ask("GET", "/v1/models")
        except OSError as error:
            raise CannotRun(f"{self._parts.geturl()} doesn't answer: {error}") from None
        if status != http.client.OK:
            raise CannotRun(f"{self._parts.geturl()}/v1/models answers with status {status}")
        self._name = answer["data"][0]["id"]
        self._threads = ThreadPoolExecutor(setup.num_jobs)
        self.reset()

    def versions(self) -> dict[str, str]:
        """See `Contender`."""
        return {"url": self._parts.geturl(), "model": self._name, "prefix cache flushed by": self._flush}

    def reset(self) -> None:
        """Empties the server's prefix cache, if it has a known way to."""
        worked = (path for path in FLUSH_PATHS if self._ask("POST", path)[0] == http.client.OK)
        self._flush = next(worked, "nothing: repeats may find their prompts cached")

    def run(self, jobs: list[Job]) -> list[list[int]]:
        """See `Contender`. Such servers return no token ids, and are taken at their count."""
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
            raise RuntimeError(f"status {status}: {answer}")
        return [UNTOLD] * int(answer["usage"]["completion_tokens"])

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        """Status and JSON, or text, of one request on a connection of its own."""
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
