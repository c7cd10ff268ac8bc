"""DeepSeek-V2 and DeepSeek-V2-Lite. `layout.py`: config and tensors; `role.py`: the role of a graph."""
