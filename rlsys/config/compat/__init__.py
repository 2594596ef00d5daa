"""Configuration keys of other projects: verl, AReaL, RLinf."""
