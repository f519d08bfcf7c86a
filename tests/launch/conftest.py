from tests.support.tiny_rollouts import hf_engine, tiny_model, tiny_tokenizer  # noqa: F401
