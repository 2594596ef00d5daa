"""Images of conversations: content parts of type image_url with data URLs, which are plain JSON."""

import base64
from collections.abc import Mapping, Sequence
from typing import Any

from rlsys.data.images import IMAGE_PARTS, ImageError, load_image, png_bytes
from rlsys.telemetry.jsonl import JsonObject

Messages = Sequence[Mapping[str, object]]
TEXTS = ("text", "input_text", "output_text")


def image_part(value: object) -> JsonObject:
    """An image as a content part: a data URL as it is, pixels and the bytes of a file as PNG. ValueError for others."""
    url = value.get("url") if isinstance(value, Mapping) else value
    if url is None:
        raise ImageError("an image part has no image")
    if not isinstance(url, str):
        url = png_url(png_bytes(load_image(url)))
    elif not url.startswith("data:"):
        raise ImageError(f"{url[:100]}: images of messages must be data URLs; nothing is read or fetched for them")
    return {"type": "image_url", "image_url": {"url": url}}


def png_url(data: bytes) -> str:
    """The data URL of a PNG file."""
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def plain_content(content: Sequence[Mapping[str, Any]]) -> str | list[JsonObject]:
    """The content parts of a message: as one text, or as text and image_url parts. ValueError for others."""
    if other := {part.get("type") for part in content} - {*TEXTS, *IMAGE_PARTS}:
        raise ValueError(f"content of type {', '.join(map(str, other))} is not supported, only text and images")
    if all(part["type"] in TEXTS for part in content):
        return "".join(part["text"] for part in content)
    return [
        {"type": "text", "text": part["text"]}
        if part["type"] in TEXTS
        else image_part(part.get(IMAGE_PARTS[part["type"]]))
        for part in content
    ]


def image_urls(messages: Messages) -> tuple[str, ...]:
    """The data URLs of all images of plain messages, in their order."""
    parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
    return tuple(part["image_url"]["url"] for part in parts if part["type"] == "image_url")


def with_placeholders(messages: Messages) -> list[Mapping[str, object]]:
    """Plain messages as chat templates take them."""
    return [
        {**m, "content": [{"type": "image"} if part["type"] == "image_url" else part for part in m["content"]]}
        if isinstance(m["content"], list)
        else m
        for m in messages
    ]
