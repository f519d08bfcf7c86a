"""Serves the classroom: teacher, student and judge behind HTTP: `python vllm_server.py --config-name X.yaml`. Without
a model, the page on what a run left: `python vllm_server.py --view runs/quickstart`."""

from classroom_rl.launch.server import main

if __name__ == "__main__":
    main()
