"""Talk with a pipeline of real models on a CPU: ask by voice or text, show a picture, get text and speech.

Four roles, one file each: `whisper.py` (speech → text), `rapidocr.py` (picture → text), `smollm2.py` (chat, streamed
token by token), `hibari_speech.py` (sentence → speech). `graph.py` joins them: open it first. `sentences.py` cuts the
token stream into sentences, `media.py` turns files into arrays and back, `weights.py` finds the model files,
`make_samples.py` makes the files under `samples/`.

All weights lie inside packages: see `requirements/demo.txt`.
"""
