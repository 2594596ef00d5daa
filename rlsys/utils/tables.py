"""Tables as plain text."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], *, num_left: int = 1) -> str:
    """Columns of text, the first ones to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    pads = [str.ljust] * num_left + [str.rjust] * (len(widths) - num_left)
    rows = (zip(pads, line, widths, strict=True) for line in lines)
    return "\n".join("  ".join(pad(cell, width) for pad, cell, width in row).rstrip() for row in rows)
