#!/usr/bin/env bash
# Installs a wheel into an empty environment in an empty folder, serves the bundled model there, asks it and chats.
#     scripts/try_wheel.sh dist/jaxsgl-0.1.0-py3-none-any.whl
set -euo pipefail
wheel=$(realpath "$1")
folder=$(mktemp -d)
cd "$folder"
"${PYTHON:-python3}" -m venv venv
venv/bin/pip install -q "$wheel"
: > server.log
[[ "jaxsgl-$(venv/bin/jaxsgl --version | cut -d' ' -f2)-py3-none-any.whl" == "$(basename "$wheel")" ]]
venv/bin/jaxsgl serve --port 0 --grpc-port 0 --max-running-requests 8 --decode-buckets 8 \
  --extend-buckets 64 --chunked-prefill-size 64 --max-total-tokens 4096 2> server.log &
server=$!
trap 'kill $server 2> /dev/null || true; wait $server 2> /dev/null || true; rm -rf "$folder"' EXIT
for _ in $(seq 300); do
  grep -q "ready: " server.log && break
  kill -0 $server || { cat server.log; exit 1; }
  sleep 1
done
http=$(sed -nE 's/.*listening on .* and (\S+) \(HTTP\).*/\1/p' server.log | head -1)
grpc=$(sed -nE 's/.*listening on (\S+) \(gRPC\).*/\1/p' server.log | head -1)
venv/bin/python - "$http" <<'PY'
import sys, urllib.request
for path in ("", "page/style.css", "docs", "health"):
    with urllib.request.urlopen(f"http://{sys.argv[1]}/{path}") as answer:
        assert answer.status == 200 and answer.read(), path
PY
answer=$(venv/bin/jaxsgl client --addr "$grpc" --temperature 0 "What is 3 + 4?")
talk=$(venv/bin/jaxsgl chat --addr "$grpc" --temperature 0 <<< "What is 2 + 5?")
echo "$answer $talk"
[[ "$answer" == *"3 + 4 = 7."* && "$talk" == *"2 + 5 = 7."* ]]
