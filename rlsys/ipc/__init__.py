"""How processes exchange values: one codec, one framing, one RPC. Nothing is ever unpickled."""
