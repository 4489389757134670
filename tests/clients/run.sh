#!/usr/bin/env bash
# Starts the development build of the server with the default model and runs the official client against it.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

work=$(mktemp -d)
trap 'kill "${server:-}" 2>/dev/null || true; rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet openai

binary=${CARGO_TARGET_DIR:-target}/debug/millpond
"$binary" pull default
"$binary" serve --model default --port 0 >"$work/out" 2>"$work/err" &
server=$!
for _ in $(seq 300); do
    base=$(grep -om1 'http://127.0.0.1:[0-9]*' "$work/out" || true)
    [ -n "$base" ] && break
    kill -0 "$server" || { cat "$work/err"; exit 1; }
    sleep 0.1
done
"$work/venv/bin/python" tests/clients/openai_client.py "$base/v1"
