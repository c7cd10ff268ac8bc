"""The `omni-flow` command. Open `main.py` first; `command.py` says how errors become messages and exit codes.

`target.py` finds the graph a user names, `flags.py` makes a flag of each placeholder, `values.py` and `media.py` turn
what is given there into values, `show.py` shows what comes back. The other files hold one command each.
"""
