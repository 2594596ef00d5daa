"""Graders and the killable pool they run in."""
