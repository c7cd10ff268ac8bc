"""The models: what their checkpoints hold and how a conversation becomes tokens. One package a model.

`families.py` finds the package for a checkpoint; `chat.py` is a language model as a role; `tokenizer.py` turns
conversations into tokens.
"""
