"""Ask the served demo from Python: first `omni-flow serve examples/voice_vision_chat`.

Once with the official `openai` client, once with Omni-Flow's own, which has all placeholders and outputs of the graph.
"""

from __future__ import annotations

import base64
import os
import sys
import wave
from pathlib import Path
from typing import Any

import openai

from omni_flow.client import connect

SAMPLES = Path(__file__).parent / "samples"
MODEL = "voice_vision_chat"


def with_openai(url: str, key: str, out: Path) -> str:
    """Ask aloud, show a picture, and hear the answer; gives its text. The sound goes to `out`."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key)
    speech = base64.b64encode((SAMPLES / "picture_question.wav").read_bytes()).decode()
    picture = base64.b64encode((SAMPLES / "sign.png").read_bytes()).decode()
    content: list[Any] = [
        {"type": "input_audio", "input_audio": {"data": speech, "format": "wav"}},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
    ]
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        modalities=["text", "audio"],
        audio={"voice": "default", "format": "pcm16"},
        stream=True,
    )
    said = ""
    with wave.open(str(out), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        for chunk in stream:
            audio = getattr(chunk.choices[0].delta, "audio", None) or {}
            said += audio.get("transcript", "")
            print(audio.get("transcript", ""), end="", flush=True)
            file.writeframes(base64.b64decode(audio.get("data", "")))
    print()
    return said


def with_omni_flow(url: str, key: str) -> str:
    """Ask in writing; gives the answer's text."""
    with connect(url, MODEL, key=key) as app:
        request = app.submit(text="What is the capital of France?", deadline=120.0, timeline=True)
        said = ""
        for name, value in request:
            if name == "text":
                said += value
                print(value, end="", flush=True)
        print()
        for span in request.timeline()[:5]:
            print(f"{span.interface} on {span.replica}: {span.ended - span.started:.2f} s")
    return said


if __name__ == "__main__":
    server = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
    api_key = os.environ.get("OMNI_FLOW_API_KEY", "none")
    with_openai(server, api_key, Path("answer.wav"))
    with_omni_flow(server, api_key)
