"""A loop of tool calls with Anthropic's client, the second turn streamed."""

import json
import os

from anthropic import Anthropic

client = Anthropic()
tool = {
    "name": "multiply",
    "description": "The product of two numbers.",
    "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
messages = [{"role": "user", "content": json.loads(os.environ["RLSYS_ROW"])["prompt"][0]["content"]}]
asked = {"model": "claude", "max_tokens": 300, "tools": [tool], "system": "Use the tool."}
answer = client.messages.create(messages=messages, **asked)
assert answer.stop_reason == "tool_use", answer
(call,) = (block for block in answer.content if block.type == "tool_use")
product = str(call.input["a"] * call.input["b"])
result = {"type": "tool_result", "tool_use_id": call.id, "content": product}
messages += [{"role": "assistant", "content": answer.content}, {"role": "user", "content": [result]}]
with client.messages.stream(messages=messages, **asked) as stream:
    assert "".join(stream.text_stream) == "42"
