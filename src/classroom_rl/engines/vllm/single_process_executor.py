"""vLLM's executor for an engine on a CPU: scheduler and model in one process.

vLLM's own executor for CPUs runs the model in a process beside the scheduler. Both wait for each other's messages in a
busy loop, up to a second after the last one, and so take the cores from the other engine, the server and the trainer.
vLLM has the second process because OpenMP reads its cores from the environment before the model's process starts. Here
the whole engine starts with them (`_engine_environment` in engine_start.py).
"""

from vllm.v1.executor.uniproc_executor import UniProcExecutor


class SingleProcessExecutor(UniProcExecutor):
    """vLLM's executor for one process. Its name is given by path, since vLLM replaces "uni" by "mp" on CPUs."""
