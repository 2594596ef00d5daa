"""OpenAI's Responses API in terms of chat completions: requests become chat messages, completions become responses."""

from collections.abc import Iterator
from typing import Any

from rlsys.agent.template import tool_call
from rlsys.telemetry.jsonl import JsonObject


def chat_request(body: JsonObject) -> JsonObject:
    """The chat completion that a response asks for. ValueError for what needs state or tools of OpenAI's servers."""
    if body.get("previous_response_id") or body.get("conversation"):
        raise ValueError("responses are not stored; send the whole conversation as input")
    given = body["input"]
    messages = [{"role": "system", "content": body["instructions"]}] if body.get("instructions") else []
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        _append(messages, item)
    tools = [_tool(tool) for tool in body.get("tools") or []]
    asked = {name: body.get(name) for name in ("model", "tool_choice")}
    asked["response_format"] = (body.get("text") or {}).get("format")
    return {**asked, "max_tokens": body.get("max_output_tokens"), "messages": messages, "tools": tools}


def response(completion: JsonObject, body: JsonObject) -> JsonObject:
    """A chat completion as a response to `body`."""
    (choice,), name = completion["choices"], completion["id"].removeprefix("chatcmpl-")
    message, usage = choice["message"], completion["usage"]
    output: list[dict[str, object]] = []
    if message["content"]:
        text = {"type": "output_text", "text": message["content"], "annotations": []}
        output.append(
            {"type": "message", "id": f"msg_{name}", "role": "assistant", "status": "completed", "content": [text]}
        )
    for number, call in enumerate(message.get("tool_calls") or []):
        called = {"call_id": call["id"], **call["function"], "status": "completed"}
        output.append({"type": "function_call", "id": f"fc_{name}_{number}", **called})
    is_cut = choice["finish_reason"] == "length"
    return {
        "id": f"resp_{name}",
        "object": "response",
        "created_at": completion["created"],
        "model": completion["model"],
        "status": "incomplete" if is_cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
        "output": output,
        "tools": body.get("tools") or [],
        "tool_choice": body.get("tool_choice") or "auto",
        "parallel_tool_calls": True,
        "usage": {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": usage["total_tokens"],
        },
    }


def events(whole: JsonObject) -> Iterator[JsonObject]:
    """The events of a streamed response: its items, each as one piece."""
    yield {"type": "response.created", "response": {**whole, "status": "in_progress", "output": [], "usage": None}}
    for at, item in enumerate(whole["output"]):
        place = {"output_index": at, "item_id": item["id"]}
        if item["type"] == "message":
            yield {"type": "response.output_item.added", "output_index": at, "item": {**item, "content": []}}
            (part,), place = item["content"], {**place, "content_index": 0}
            yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
            yield {"type": "response.output_text.delta", **place, "delta": part["text"], "logprobs": []}
            yield {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": []}
            yield {"type": "response.content_part.done", **place, "part": part}
        else:
            yield {"type": "response.output_item.added", "output_index": at, "item": {**item, "arguments": ""}}
            yield {"type": "response.function_call_arguments.delta", **place, "delta": item["arguments"]}
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield {"type": "response.function_call_arguments.done", **place, **done}
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{whole['status']}", "response": whole}


def _append(messages: list[dict[str, Any]], item: JsonObject) -> None:
    """Append an item of the input; calls that follow an answer, or each other, belong to one assistant message."""
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item["role"], "content": item["content"]})
    elif kind == "function_call":
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        messages[-1].setdefault("tool_calls", []).append(tool_call(item["call_id"], item["name"], item["arguments"]))
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": item["output"]})
    else:
        raise ValueError(f"input of type {kind} is not supported")


def _tool(tool: JsonObject) -> JsonObject:
    if tool["type"] != "function":
        raise ValueError(f"tools of type {tool['type']} run on OpenAI's servers; only functions are supported")
    return {"type": "function", "function": {key: tool.get(key) for key in ("name", "description", "parameters")}}
