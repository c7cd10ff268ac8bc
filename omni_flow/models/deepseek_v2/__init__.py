"""DeepSeek-V2 and DeepSeek-V2-Lite. `layout.py`: config and tensors; `processor.py`: conversation to tokens and back;
`role.py`: the role of a graph."""
