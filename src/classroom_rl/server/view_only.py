"""The viewer without a model: `python vllm_server.py --view RUN_FOLDER`, with the same overrides as the server."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fastapi import FastAPI
from pydantic import BaseModel

from classroom_rl.config.load import USER_ERRORS, load, read_keys
from classroom_rl.config.train_rl import TrainRLConfig
from classroom_rl.errors import DataError
from classroom_rl.results.evaluation_files import CONVERSATIONS_NAME
from classroom_rl.server.app import uvicorn_options
from classroom_rl.server.auth import token_for
from classroom_rl.server.error_responses import ERROR_RESPONSES, add_error_answers
from classroom_rl.server.middleware import add_request_checks
from classroom_rl.system.keys import print_error
from classroom_rl.system.processes import refuse_taken_port
from classroom_rl.viewer.routes import add_viewer, page_files

FLAG = "--view"
_FILES_OF_RUNS = ("metrics.jsonl", "journal.jsonl", "rollouts", "eval", CONVERSATIONS_NAME)


class ViewerHealth(BaseModel):
    """Response of `GET /health`: the fields of a server's that need no model. `live` is false: no model is loaded."""

    status: str = "ok"
    run_folder: str
    live: bool = False


def view(arguments: Sequence[str]) -> int:
    """Show the run folder that follows `--view`, until interrupted; returns the exit status."""
    read_keys()
    try:
        folder, overrides = _split(arguments)
        config = load(TrainRLConfig, "train_rl", overrides)
        host, port = config.generation.server_host, config.generation.server_port
        refuse_taken_port(host, port)
        app = create_viewer(_run_folder(folder), token_for(host), config.generation.allowed_hosts)
    except USER_ERRORS as error:
        print_error(error)
        return 2
    _run(app, host, port)
    return 0


def create_viewer(run_folder: Path, token: str | None, allowed_hosts: Sequence[str] = ()) -> FastAPI:
    """Create the application that shows a run folder. It loads no model, and writes nothing to the folder but decisions
    at the teacher's desk. Without a token it answers only under this machine's own names and `allowed_hosts`."""
    app = FastAPI(title="Classroom viewer", responses=ERROR_RESPONSES)
    add_error_answers(app)
    add_request_checks(app, token, allowed_hosts, page_files())
    add_viewer(app, run_folder, live=False)

    @app.get("/health")
    def health() -> ViewerHealth:
        return ViewerHealth(run_folder=str(run_folder))

    return app


def _run(app: FastAPI, host: str, port: int) -> None:
    import uvicorn

    print(f"http://{f'[{host}]' if ':' in host else host}:{port}/ shows the run; Ctrl-C ends it", flush=True)
    with suppress(KeyboardInterrupt):
        uvicorn.Server(uvicorn_options(app, host, port)).run()


def _split(arguments: Sequence[str]) -> tuple[str, list[str]]:
    """Split the arguments into the run folder and the others."""
    remaining = list(arguments)
    position = next(index for index, argument in enumerate(remaining) if argument.partition("=")[0] == FLAG)
    flag, equals, folder = remaining.pop(position).partition("=")
    if not equals:
        folder = remaining.pop(position) if position < len(remaining) else ""
    if not folder or folder.startswith("-"):
        raise DataError(f"{flag} needs a run folder: python vllm_server.py {flag} runs/quickstart")
    return folder, remaining


def _run_folder(name: str) -> Path:
    folder = Path(name).resolve()
    if not any((folder / file_name).exists() for file_name in _FILES_OF_RUNS):
        raise DataError(
            f"{FLAG} {name}: there is nothing to show; a run folder holds one of {', '.join(_FILES_OF_RUNS)}. Give the "
            "logging.save_dir of a training or an evaluation."
        )
    return folder
