"""Serving: graphs over HTTP, as OpenAI's API where a graph says how, and as they are under `/v1/graphs`.

Open `app.py` first (what is put together), then `endpoints.py` (how a graph states what it serves), `running.py` (a
request under way), `guard.py` (what every call passes), `native.py` and the `chat.py`, `audio.py`, `images.py` ... of
the OpenAI API. `server.py` runs it; `cli.py` is the command. Nothing here knows any model.
"""
