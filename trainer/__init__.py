"""The controller: entry points, the loop and what it is built from."""

import rlsys  # noqa: F401 - reports an interrupt from now on
