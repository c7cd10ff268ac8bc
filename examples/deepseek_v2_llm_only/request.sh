#!/usr/bin/env bash
# Ask the served model with curl: first  omni-flow serve examples/deepseek_v2_llm_only
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
auth=(${OMNI_FLOW_API_KEY:+-H "Authorization: Bearer $OMNI_FLOW_API_KEY"})

ask() { curl -fsSN "${auth[@]}" -H 'Content-Type: application/json' -d "$1" "$url/v1/chat/completions"; }

echo '1. A conversation, answered word by word, with the usage at the end'
ask '{"model": "deepseek_v2_llm_only", "stream": true, "stream_options": {"include_usage": true}, "max_tokens": 24,
  "messages": [{"role": "system", "content": "Answer in one sentence."},
               {"role": "user", "content": "Why is the sky blue?"}]}'

echo '2. An answer that fits a JSON schema'
ask '{"model": "deepseek_v2_llm_only", "max_tokens": 200,
  "messages": [{"role": "user", "content": "Is 7 a prime number?"}],
  "response_format": {"type": "json_schema", "json_schema": {"name": "verdict", "schema": {
    "type": "object", "properties": {"prime": {"type": "boolean"}}, "required": ["prime"],
    "additionalProperties": false}}}}'
echo

echo '3. The likeliest tokens at each place'
ask '{"model": "deepseek_v2_llm_only", "max_tokens": 2, "logprobs": true, "top_logprobs": 3,
  "messages": [{"role": "user", "content": "The capital of France is"}]}'
echo
