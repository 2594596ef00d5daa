"""Worker groups on resource pools: dispatch, execution, failure."""
