#!/usr/bin/env bash
# Ask the served model with curl: first  omni-flow serve examples/deepseek_v2_disaggregated
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
auth=(${OMNI_FLOW_API_KEY:+-H "Authorization: Bearer $OMNI_FLOW_API_KEY"})

post() { curl -fsSN "${auth[@]}" -H 'Content-Type: application/json' -d "$2" "$url$1"; }

echo '1. A question, answered word by word, with the usage at the end'
post /v1/chat/completions '{"model": "deepseek_v2_disaggregated", "stream": true, "max_tokens": 24,
  "stream_options": {"include_usage": true}, "messages": [{"role": "user", "content": "Why is the sky blue?"}]}'

echo '2. Every output and when each role was at work: "reused" says how much KV the decode role found in the pool'
post /v1/graphs/deepseek_v2_disaggregated/requests '{"inputs": {"prompt": "Why is the sky blue, and why is it red?"},
  "params": {"max_tokens": 8}, "timeline": true}'
echo
