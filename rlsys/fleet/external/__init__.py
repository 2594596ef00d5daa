"""External SGLang and vLLM servers as rollout engines."""
