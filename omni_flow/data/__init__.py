"""Data flow: where bytes are. Knows no graph; a library and a server of its own."""
