"""What the overlay needs of vLLM beyond its plugin surface: patches per version, and the contract that both rest on.

`python -m patches` (run in `overlay/`) renders, checks and applies them; see `__main__`.
"""
