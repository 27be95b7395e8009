"""`python -m exl3kit.cli`: what `kit.py` runs once its environment stands."""

from exl3kit.cli import main

main()
