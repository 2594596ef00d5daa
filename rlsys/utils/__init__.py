"""Small helpers without heavy imports."""
