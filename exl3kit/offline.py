"""Without a network: what is not in the cache is refused at once, instead of after a minute of name look-ups."""

from __future__ import annotations

import os
from collections.abc import Sequence

from exl3kit.errors import ExitCode, KitError

VARIABLE = "EXL3KIT_OFFLINE"


def choose() -> None:
    """From now on nothing is fetched, in programs that this one starts either."""
    os.environ[VARIABLE] = "1"


FETCH = "`kit fetch RECIPE` with a network, or `kit bundle load FILE` of one made where there is a network"


def refuse(missing: Sequence[str], next_step: str = FETCH) -> None:
    """Raise `KitError` (preflight) when something is missing that only a network has, and there is to be none."""
    if not missing or os.environ.get(VARIABLE, "0") in ("", "0"):
        return
    named = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
    raise KitError(
        f"{named} {'is' if len(missing) == 1 else 'are'} not here, and nothing may be fetched",
        where="--offline",
        next_step=next_step,
        code=ExitCode.PREFLIGHT,
    )
