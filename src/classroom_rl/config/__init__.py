"""The schema of the configurations, and how YAML and overrides are composed."""

import sys
from importlib.util import find_spec

if find_spec("hydra") is None:
    sys.exit("error: this program needs more packages: pip install 'classroom-rl[train,vllm]'")
