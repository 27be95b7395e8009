"""Programs that the kit runs inside containers on nodes: standard library only, each complete in its one file.

They are handed to `python3 -c`, so a node needs nothing but its engine.
"""
