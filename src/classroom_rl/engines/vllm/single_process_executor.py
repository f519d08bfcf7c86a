"""vLLM's executor for an engine on a CPU: scheduler and model in one process.

vLLM's own executor for CPUs runs the model in a second process. Scheduler and model wait for each other's messages in a
busy loop, for up to a second after the last one, and so take cores from the other engine, the server and the trainer.
vLLM needs the second process because OpenMP reads the cores to use from the environment when a process starts. Here
the whole engine starts with the right environment (`_engine_environment` in engine_start.py).
"""

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class SingleProcessExecutor(UniProcExecutor):
    """vLLM's executor for one process. It is configured by this class's path, because vLLM replaces "uni" with "mp" on
    CPUs."""
