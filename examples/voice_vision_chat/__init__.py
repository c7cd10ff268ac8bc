"""Talk with a pipeline of real models on a CPU: ask by voice or text, show a picture, get text and speech.

Open `graph.py` first: it joins four roles, one file each: `asr.py` (speech → text), `ocr.py` (picture → text), `llm.py`
(chat, streamed token by token) and `tts.py` (sentence → speech). `sentences.py` cuts the token stream into sentences,
`weights.py` finds the model files, `make_samples.py` made the files under `samples/`. All weights lie inside packages,
nothing is downloaded at run time: see `requirements/demo.txt`. The LLM runs in an SGLang engine, see `docs/compute.md`.
"""
