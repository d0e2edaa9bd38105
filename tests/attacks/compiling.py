"""Compiles a grammar as the server does and asks for some masks, in a helper process of `Sandbox`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from jaxsgl.config.engine import BUNDLED_MODEL
from jaxsgl.constraints.compiler import Compiler
from jaxsgl.requests.grammar import Grammar, Kind

VOCAB, EOS = 1024, (1021, 1023)
NUM_MASKS = 10


def make(_: bytes) -> Callable[[bytes], bytes]:
    """Takes (kind, text) and returns milliseconds of processor time, (of compiling, of the slowest mask), as JSON."""
    compiler = Compiler(Path(BUNDLED_MODEL), VOCAB, EOS)

    def run(request: bytes) -> bytes:
        kind, text = json.loads(request)
        times_s = [time.process_time()]
        matcher = compiler.compile(Grammar(kind, text))
        words = np.zeros(-(-VOCAB // 32), dtype=np.uint32)
        times_s.append(time.process_time())
        for _ in range(NUM_MASKS):
            matcher.mask_into(words)
            times_s.append(time.process_time())
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
            text_tokens = [int(token) for token in allowed if token not in EOS]
            if matcher.ended or not text_tokens:
                break
            matcher.advance(text_tokens[0])
        spent = np.diff(times_s) * 1000
        return json.dumps([spent[0], max(spent[1:])]).encode()

    return run


def request(kind: Kind, text: str) -> bytes:
    """What `make`'s function takes."""
    return json.dumps([kind, text]).encode()
