"""Typed configuration with verl's key names; imports neither torch nor ray."""
