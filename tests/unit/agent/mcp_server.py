"""An MCP server: over its standard streams, or with an argument over HTTP on that port of loopback."""

import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("arithmetic")


@server.tool()
def multiply(a: int, b: int) -> int:
    """The product of two numbers."""
    return a * b


@server.tool()
def fail() -> str:
    """Always fails."""
    raise ValueError("no such thing")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
