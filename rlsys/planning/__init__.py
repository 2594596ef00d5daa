"""Memory and layouts computed without workers."""
