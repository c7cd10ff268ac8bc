"""The `omni-flow` command."""
