"""Pages that are opened from disk: one self-contained file each, put together from the files in `assets`.

The only script that may run is the page's own, allowed by its hash, so no other could run even if markup got in.
"""

import base64
import hashlib
import json
import re
from functools import cache
from importlib.resources import files

from rlsys.telemetry.jsonl import plain_json


@cache
def page(name: str) -> str:
    """The page of `assets/{name}.html` with its styles and scripts; a `{{data}}` in it is left to be filled."""
    assets = files("rlsys.telemetry").joinpath("assets")
    text = assets.joinpath(f"{name}.html").read_text(encoding="utf-8")
    text = re.sub(r"\{\{(\w+\.\w+)\}\}", lambda m: assets.joinpath(m[1]).read_text(encoding="utf-8"), text)
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)
    assert script is not None
    return text.replace("SCRIPT_HASH", base64.b64encode(hashlib.sha256(script[1].encode()).digest()).decode(), 1)


def ascii_json(data: object) -> str:
    """Strict JSON in ASCII that may stand inside a script element: nothing in it can end one."""
    text = json.dumps(plain_json(data), ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")
