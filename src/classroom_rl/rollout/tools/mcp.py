"""Makes the tools of an MCP server available as `Tool`s. The package `mcp` is imported when it is first needed."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from classroom_rl.rollout.tools.tool import Tool, ToolFailure

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import Tool as ListedTool


@asynccontextmanager
async def mcp_tools(command: Sequence[str], env: Mapping[str, str] | None = None) -> AsyncIterator[list[Tool]]:
    """Start an MCP server over standard input and output, and yield its tools; the server ends with the block.

    Args:
        command: the program and its arguments.
        env: its environment variables, besides the few that `mcp` passes on; None for only those.
    """
    from mcp import Client, StdioServerParameters, stdio_client

    program, *arguments = command
    server = StdioServerParameters(command=program, args=arguments, env=None if env is None else dict(env))
    async with Client(stdio_client(server)) as client:
        yield [_tool(client, tool) for tool in (await client.list_tools()).tools]


def _tool(client: "Client", listed: "ListedTool") -> Tool:
    async def call(**arguments: Any) -> str:
        result = await client.call_tool(listed.name, arguments)
        text = "\n".join(getattr(part, "text", f"({part.type} that is not shown)") for part in result.content)
        if result.is_error:
            raise ToolFailure(text)
        return text

    description = listed.description or listed.title or listed.name
    return Tool(call, listed.name, description, listed.input_schema, _checker(listed.input_schema))


def _checker(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], None]:
    """A function that raises a `ValueError` if arguments do not match the schema."""
    from jsonschema import Draft202012Validator

    validator = Draft202012Validator(schema)

    def check(arguments: Mapping[str, Any]) -> None:
        for error in validator.iter_errors(arguments):
            raise ValueError(f"{error.json_path}: {error.message}")

    return check
