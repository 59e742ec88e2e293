#!/usr/bin/env bash
# A router from BIN (of infra/images/try.sh) has neither torch nor Ray, starts, tells its health, and ends when told.
#   infra/images/try_router_starts.sh BIN
set -euo pipefail
bin="$(cd "$1" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT
cd "$work"
"$bin/python" -I -c '
import importlib.util as u
found = [name for name in ("torch", "ray", "psutil", "pip") if u.find_spec(name)]
print("not there: torch, ray, psutil, pip" if not found else f"there: {found}")
raise SystemExit(bool(found))'
port="$("$bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')"
"$bin/python" -m shoal.router --listen 127.0.0.1:0 --health-listen "127.0.0.1:$port" --controller 127.0.0.1:9 >out 2>err &
router=$!
for _ in $(seq 60); do
    if live="$("$bin/shoal" health -a "127.0.0.1:$port" --service shoal.live 2>/dev/null)"; then break; fi
    sleep 1
done
echo "live: ${live:-no}"
code=0
"$bin/shoal" health -a "127.0.0.1:$port" || code=$?
echo "without workers: exit code $code (3 is right)"
kill "$router"
wait "$router"
test "$code" = 3
cat out
