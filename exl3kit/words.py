"""Words that change with a number."""


def counted(number: int, what: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {what}" + ("s" if number != 1 else "")
