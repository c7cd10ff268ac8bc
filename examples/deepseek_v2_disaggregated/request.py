"""Ask the served model from Python: first `omni-flow serve examples/deepseek_v2_disaggregated`.

Once with the official `openai` client, once with Omni-Flow's own, which shows how the two roles share the work.
"""

from __future__ import annotations

import os
import sys

import openai

from omni_flow.client import connect

MODEL = "deepseek_v2_disaggregated"


def with_openai(url: str, key: str) -> str:
    """Ask and print the answer; gives it."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    answer = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Why is the sky blue?"}], max_tokens=32
    )
    said = answer.choices[0].message.content or ""
    print(said)
    if answer.usage is not None:
        print(f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out")
    return said


def with_omni_flow(url: str, key: str) -> int:
    """Ask, and show when each role was at work; gives the tokens whose KV the decode role found in the pool."""
    with connect(url, MODEL, key=key) as app:
        request = app.submit(
            prompt="Why is the sky blue, and why is it red?", params={"max_tokens": 16}, deadline=120.0, timeline=True
        )
        answer = request.result()
        for span in request.timeline():
            print(f"{span.interface} on {span.replica}: {(span.ended - span.started) * 1000:.0f} ms")
    reused: int = answer["reused"]
    print(f"{''.join(answer['text'])}\nthe decode role found {reused} tokens of the prompt in the pool")
    return reused


if __name__ == "__main__":
    server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    api_key = os.environ.get("OMNI_FLOW_API_KEY", "none")
    with_openai(server, api_key)
    with_omni_flow(server, api_key)
