"""What an SGLang server imports of us: scripts/run_sglang.sh names this package to it."""
