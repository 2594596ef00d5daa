"""The controller: entry points, the loop and what it is built from."""

import sys

if sys.argv[:1] == ["-m"]:  # a job, whose modules take a moment to import: Ctrl-C then is one line too
    sys.excepthook = lambda kind, error, trace: (
        print("rlsys: interrupted (Ctrl-C)", file=sys.stderr)
        if kind is KeyboardInterrupt
        else sys.__excepthook__(kind, error, trace)
    )
