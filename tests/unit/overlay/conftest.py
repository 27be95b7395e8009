"""The overlay's pure modules are tested without vLLM and without torch."""

import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(REPO / "overlay"))
