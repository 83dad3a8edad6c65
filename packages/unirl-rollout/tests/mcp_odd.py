"""A server written by hand: pages of tools, results that are none, and schemas that cannot be used, by its argument."""

import json
import sys

SCHEMA = {"type": "object"}
if "broken" in sys.argv:
    SCHEMA = {"type": "object", "properties": {"a": {"type": "nothing"}}}
if "elsewhere" in sys.argv:
    SCHEMA = {"type": "object", "properties": {"a": {"$ref": "https://example.org/schema.json"}}}
PAGES = {None: ("odd", "two"), "two": ("silent", None)}


def answer(method, params):
    if method == "initialize":
        said = {"name": "odd", "version": "1"}
        return {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": said}
    if method == "tools/list":
        name, following = PAGES[(params or {}).get("cursor")]
        more = {} if following is None else {"nextCursor": following}
        return {"tools": [{"name": name, "inputSchema": SCHEMA}], **more}
    return {"nothing": 1} if params["name"] == "odd" else None


for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked:
        continue
    head = {"jsonrpc": "2.0", "id": asked["id"]}
    if asked["method"] not in ("initialize", "tools/list", "tools/call"):
        print(json.dumps({**head, "error": {"code": -32601, "message": "unknown"}}), flush=True)
    elif (said := answer(asked["method"], asked.get("params"))) is not None:
        print(json.dumps({**head, "result": said}), flush=True)
