"""Anthropic's Messages API in terms of chat completions: requests become chat messages, completions become messages."""

import json
from collections.abc import Iterator
from typing import Any

from rlsys.agent.template import tool_call
from rlsys.telemetry.jsonl import JsonObject

STOP_REASONS = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}


def chat_request(body: JsonObject) -> JsonObject:
    """The chat completion that a message asks for. ValueError for content other than text, images and tools."""
    messages: list[JsonObject] = [{"role": "system", "content": body["system"]}] if body.get("system") else []
    messages += [chat for message in body["messages"] for chat in _chat_messages(message)]
    tools = [
        {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["input_schema"]}
        for tool in body.get("tools") or []
    ]
    return {
        "model": body.get("model"),
        "messages": messages,
        "tools": [{"type": "function", "function": tool} for tool in tools],
        "tool_choice": (body.get("tool_choice") or {}).get("type"),
        "max_tokens": body.get("max_tokens"),
        "response_format": (body.get("output_config") or {}).get("format"),
    }


def response(completion: JsonObject, body: JsonObject) -> JsonObject:
    """A chat completion as the message that answers `body`."""
    (choice,) = completion["choices"]
    message, usage = choice["message"], completion["usage"]
    content: list[dict[str, object]] = [{"type": "text", "text": message["content"]}] if message["content"] else []
    for call in message.get("tool_calls") or []:
        called = {"name": call["function"]["name"], "input": json.loads(call["function"]["arguments"])}
        content.append({"type": "tool_use", "id": call["id"], **called})
    return {
        "id": completion["id"].replace("chatcmpl-", "msg_"),
        "type": "message",
        "role": "assistant",
        "model": completion["model"],
        "content": content,
        "stop_reason": STOP_REASONS[choice["finish_reason"]],
        "stop_sequence": None,
        "usage": {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]},
    }


def events(whole: JsonObject) -> Iterator[JsonObject]:
    """The events of a streamed message: its blocks, each as one piece."""
    yield {"type": "message_start", "message": {**whole, "content": [], "stop_reason": None}}
    for index, block in enumerate(whole["content"]):
        if block["type"] == "text":
            empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
        else:
            empty = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        yield {"type": "content_block_delta", "index": index, "delta": delta}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": whole["usage"]}
    yield {"type": "message_stop"}


def _chat_messages(message: JsonObject) -> Iterator[JsonObject]:
    """The chat messages of one message: each tool result is one of its own, before the text beside it."""
    content = message["content"]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    for block in blocks:
        if block["type"] == "tool_result":
            yield {"role": "tool", "tool_call_id": block["tool_use_id"], "content": _parts(block.get("content", ""))}
    calls = [tool_call(b["id"], b["name"], b["input"]) for b in blocks if b["type"] == "tool_use"]
    texts = [block for block in blocks if block["type"] not in ("tool_use", "tool_result")]
    if texts or calls:
        yield {"role": message["role"], "content": _parts(texts)} | ({"tool_calls": calls} if calls else {})


def _parts(content: Any) -> object:
    """Content with its images as OpenAI's parts."""
    if isinstance(content, str):
        return content
    return [
        {"type": "image_url", "image_url": f"data:{source.get('media_type')};base64,{source.get('data', '')}"}
        if block["type"] == "image" and (source := block.get("source") or {}).get("type") == "base64"
        else block
        for block in content
    ]
