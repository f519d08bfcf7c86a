"""One seat of Marooned as an OpenEnv environment; the other sailors are scripted.

It needs the package `openenv`, which is not among the project's requirements (docs/marooned.md).
"""
