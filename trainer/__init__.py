"""The controller: entry points, the loop and what it is built from."""
