"""A front-end worker that says it is ready, and then dies or stands still, as its variable of the environment says."""

from __future__ import annotations

import os
import socket
import sys
import time

channel = socket.socket(fileno=int(sys.argv[1]))
match os.environ["WORKER_DOES"]:
    case "fail":
        channel.recv(1 << 16)  # as a real one does: what the parent writes to a closed end would cut off the answer
        channel.send(b'{"type":"start_failed","message":"no such tokenizer"}\n')
    case "die at start":
        pass
    case "never be ready":
        time.sleep(60)
    case "die":
        channel.send(b'{"type":"ready"}\n')
        while b"ask_counts" not in channel.recv(1 << 16):  # the parent asks once the whole server is ready
            pass
    case "fail late":  # number 1 dies once, and can't start again
        launch = channel.recv(1 << 16)
        if b'"is_late":true' in launch:
            channel.send(b'{"type":"start_failed","message":"no such tokenizer"}\n')
        else:
            channel.send(b'{"type":"ready"}\n')
            while b"ask_counts" not in (heard := channel.recv(1 << 16)) or b'"number":2' in launch:
                if not heard or b"drain" in heard:
                    break
                channel.send(b'{"type":"counts"}\n')
    case "stand still":
        channel.send(b'{"type":"ready"}\n')
        time.sleep(60)
sys.exit(3)
