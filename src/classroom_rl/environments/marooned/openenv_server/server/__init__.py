"""The OpenEnv server of Marooned."""
