"""One seat of Marooned as an OpenEnv environment; the other sailors are scripted.

It needs the package `openenv`, which is not a requirement of the project (docs/marooned.md).
"""
