#!/usr/bin/env bash
# Ask the served demo with curl: first  omni-flow serve examples/voice_vision_chat
set -euo pipefail
url=${1:-http://127.0.0.1:8000}
here=$(cd "$(dirname "$0")" && pwd)
auth=(${OMNI_FLOW_API_KEY:+-H "Authorization: Bearer $OMNI_FLOW_API_KEY"})

echo '1. What does the picture say? (text and a picture in, text out, streamed)'
picture=$(base64 -w0 "$here/samples/sign.png")
printf '{"model": "voice_vision_chat", "stream": true, "messages": [{"role": "user", "content": [
  {"type": "text", "text": "What does the sign say?"},
  {"type": "image_url", "image_url": {"url": "data:image/png;base64,%s"}}]}]}' "$picture" |
  curl -fsSN "${auth[@]}" -H 'Content-Type: application/json' -d @- "$url/v1/chat/completions"

echo '2. What was said? (a sound file in, text out)'
curl -fsS "${auth[@]}" -F model=voice_vision_chat -F file=@"$here/samples/question.wav" "$url/v1/audio/transcriptions"
echo

echo '3. Every output of the graph as events (a form in)'
curl -fsSN "${auth[@]}" -F 'request={"stream": true, "timeline": true, "outputs": ["text", "heard"]}' \
  -F speech=@"$here/samples/question.wav" "$url/v1/graphs/voice_vision_chat/requests"
