"""What processes of tests have in common: one reads a request from its standard input, says what comes of it, and ends.

Called by the `__main__` of each. The process that starts one reads its news (`report`) and holds its input open.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from pallas_kernels.selftest.report import News, Request, news_line

Say = Callable[[News], None]


def answer(test: Callable[[Request, Say], None]) -> None:
    """Tests what standard input asks for. Whatever libraries print goes to standard error."""
    news_fd = os.dup(1)
    os.dup2(2, 1)

    def say(news: News) -> None:
        os.write(news_fd, news_line(news).encode())

    request = Request.parse(_first_line(sys.stdin.fileno()))
    threading.Thread(target=_follow, args=(sys.stdin.fileno(),), daemon=True).start()
    test(request, say)


def _first_line(fd: int) -> str:
    line = b""
    while not line.endswith(b"\n") and (more := os.read(fd, 1 << 16)):
        line += more
    return line.decode()


def _follow(fd: int) -> None:
    """Ends the process with the one that started it, which keeps its end of the pipe open."""
    while os.read(fd, 4096):
        pass
    os._exit(1)
