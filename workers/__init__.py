"""Ray-dispatchable roles: each binds a library object to @register methods."""
