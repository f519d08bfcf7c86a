"""Checks once whether the Hugging Face Hub can be reached.

Without the check, the Hub's client tries each file five times: on a machine without a network, a memory budget of three
models would take a minute.
"""

import threading
from functools import cache
from pathlib import Path
from typing import Any

ANSWERS_WITHIN_S = 3.0


@cache
def why_unreachable() -> str | None:
    """Why the Hub cannot be reached; None if it can. Sends one request and waits at most `ANSWERS_WITHIN_S` seconds,
    also if name resolution or the connection hangs. The result is cached."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons: list[str | None] = []
    asking = threading.Thread(target=lambda: reasons.append(_ask(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(ANSWERS_WITHIN_S)  # a hanging name resolution cannot be interrupted; the daemon thread is left behind
    if not reasons:
        return f"the Hugging Face Hub ({constants.ENDPOINT}) does not answer within {ANSWERS_WITHIN_S:g} s"
    return reasons[0]


def _ask(endpoint: str) -> str | None:
    import httpx2
    from huggingface_hub.utils import get_session

    try:
        status = get_session().head(endpoint, timeout=ANSWERS_WITHIN_S, follow_redirects=False).status_code
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError) as error:
        return f"the Hugging Face Hub ({endpoint}) cannot be reached: {str(error) or type(error).__name__}"
    return f"the Hugging Face Hub ({endpoint}) answers with status {status}" if status >= 500 else None


def read_options(name: str) -> dict[str, Any]:
    """Options for transformers' `from_pretrained`: only the local cache is used for a model on a Hub that cannot be
    reached."""
    return {"local_files_only": True} if not Path(name).is_dir() and why_unreachable() else {}
