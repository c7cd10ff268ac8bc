"""Ask the served model from Python: first `omni-flow serve examples/deepseek_v2_llm_only`.

Once with the official `openai` client, which sends the whole conversation each time; once with Omni-Flow's own, in a
session whose earlier turns the role knows.
"""

from __future__ import annotations

import os
import sys

import openai

from omni_flow.client import connect

MODEL = "deepseek_v2_llm_only"


def with_openai(url: str, key: str) -> str:
    """Ask, print the answer while it is made, and what it took; gives the answer."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Why is the sky blue?"}],
        max_tokens=32,
        temperature=0.7,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    )
    said = ""
    for chunk in stream:
        if chunk.choices:
            said += chunk.choices[0].delta.content or ""
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage is not None:
            print(f"\n{chunk.usage.prompt_tokens} tokens in, {chunk.usage.completion_tokens} out")
    return said


def with_omni_flow(url: str, key: str) -> list[int]:
    """Two turns of a session; gives how many tokens of each turn's prompt were found in the KV cache."""
    cached = []
    with connect(url, MODEL, key=key) as app:
        session = app.session(params={"max_tokens": 16})
        for question in ("Name a river in Europe.", "And one in Africa?"):
            answer = session.submit(prompt=question).result()
            usage = answer["usage"]
            print(f"{''.join(answer['text'])}\n{usage['cached_tokens']} of {usage['prompt_tokens']} tokens were cached")
            cached.append(usage["cached_tokens"])
        session.close()
    return cached


if __name__ == "__main__":
    server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    api_key = os.environ.get("OMNI_FLOW_API_KEY", "none")
    with_openai(server, api_key)
    with_omni_flow(server, api_key)
