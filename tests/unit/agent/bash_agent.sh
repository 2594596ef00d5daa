#!/bin/bash
# An agent without any library: asks the model twice and posts its reward.
set -euo pipefail
ask() {
  curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" -d "{\"model\": \"any\", \"messages\": [{\"role\": \"user\", \"content\": \"$1\"}]}"
}
ask "first" | grep '"content"' > /dev/null
ask "second" > /dev/null
curl -sf "$OPENAI_BASE_URL/reward" -H "Authorization: Bearer $OPENAI_API_KEY" -d '{"reward": 0.75}'
