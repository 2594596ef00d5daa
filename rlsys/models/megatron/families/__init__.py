"""One table a family; a new family is a new file with a `FAMILY` in it."""
