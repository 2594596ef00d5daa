"""OpenAI's client with streamed responses: a tool call, then the answer."""

import json
import os

from openai import OpenAI

client = OpenAI()
tool = {
    "type": "function",
    "name": "multiply",
    "description": "The product of two numbers.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
messages = [{"role": "user", "content": json.loads(os.environ["RLSYS_ROW"])["prompt"][0]["content"]}]
with client.responses.stream(model="gpt", input=messages, tools=[tool]) as stream:
    response = stream.until_done().get_final_response()
(call,) = (item for item in response.output if item.type == "function_call")
given = json.loads(call.arguments)
messages += [call, {"type": "function_call_output", "call_id": call.call_id, "output": str(given["a"] * given["b"])}]
with client.responses.stream(model="gpt", input=messages, tools=[tool]) as stream:
    text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
assert text == "42", text
