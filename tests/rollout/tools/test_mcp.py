"""The tools of an MCP server."""

import asyncio
import sys

from classroom_rl.rollout.tools.mcp import mcp_tools
from classroom_rl.rollout.tools.tool import AskedCall, Toolbox, ToolCall, ToolLimits

SERVER = '''
from mcp.server import MCPServer

server = MCPServer("tests")


@server.tool()
def double(number: int) -> int:
    """Doubles."""
    return 2 * number


@server.tool()
def fail(why: str) -> str:
    """Fails."""
    raise ValueError(why)


server.run()
'''


def test_the_tools_of_an_mcp_server(tmp_path):
    (tmp_path / "server.py").write_text(SERVER)

    async def calls() -> list[ToolCall]:
        async with mcp_tools([sys.executable, str(tmp_path / "server.py")]) as tools:
            box = Toolbox(tools, ToolLimits(seconds=60, characters=500))
            requests = [
                ("double", {"number": 21}),
                ("double", {"number": "x"}),
                ("fail", {"why": "so"}),
                ("exit", {}),
            ]
            assert box.tools["double"].description == "Doubles."
            assert box.tools["double"].parameters["properties"]["number"]["type"] == "integer"
            return [await box.run(AskedCall(name, arguments, ""), name) for name, arguments in requests]

    right, wrong, failed, unknown = asyncio.run(calls())
    assert (right.result, right.error) == ("42", None)
    assert wrong.error == "bad_arguments" and "'x' is not of type 'integer'" in wrong.result
    assert failed.error == "exception" and "Error executing tool fail" in failed.result
    assert unknown.error == "unknown_tool"
