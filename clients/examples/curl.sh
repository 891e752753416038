#!/bin/sh
# Plain curl: a stream, left in the middle, and its rest fetched by its id and the last number seen.
set -eu
url="${PENSTOCK_URL:-http://127.0.0.1:8000}/v1/responses"
key="Authorization: Bearer ${PENSTOCK_API_KEY:-none}"
events="$(mktemp)"
trap 'rm -f "$events"' EXIT

curl -sSN "$url" -H "$key" -H 'Content-Type: application/json' \
  -d '{"model": "demo", "input": "What is paged attention?", "stream": true}' |
  grep --line-buffered '^data: ' | head -n 6 >"$events"
cat "$events"

id="$(sed -n 's/.*"id":"\(resp_[^"]*\)".*/\1/p' "$events" | head -n 1)"
last="$(sed -n 's/.*"sequence_number":\([0-9]*\).*/\1/p' "$events" | tail -n 1)"
curl -sSN "$url/$id?stream=true&starting_after=$last" -H "$key" | grep '^data: '
