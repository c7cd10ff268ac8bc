"""Omni-Flow: serve any-to-any multimodal models made of unlike parts."""
