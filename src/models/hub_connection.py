"""Whether the Hugging Face Hub can be reached: asked once, before a program that only reckons asks for each model.

The Hub's own client tries each file five times, which takes a minute for three models on a machine without a network.
"""

import threading
from functools import cache
from pathlib import Path
from typing import Any

ANSWERS_WITHIN_S = 3.0


@cache
def why_unreachable() -> str | None:
    """Why the Hub cannot be asked; None if it can. One request, and no longer than `ANSWERS_WITHIN_S` seconds, also
    where names are not resolved and connections hang."""
    from huggingface_hub import constants

    if constants.is_offline_mode():
        return "HF_HUB_OFFLINE is set"
    reasons: list[str | None] = []
    asking = threading.Thread(target=lambda: reasons.append(_ask(constants.ENDPOINT)), daemon=True)
    asking.start()
    asking.join(ANSWERS_WITHIN_S)  # a resolver that hangs cannot be interrupted; the thread ends with the program
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
    """Options for transformers' `from_pretrained`: of a model on the Hub that cannot be asked, what was fetched before
    is all there is."""
    return {"local_files_only": True} if not Path(name).is_dir() and why_unreachable() else {}
